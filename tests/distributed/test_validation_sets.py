"""Validation sets with names in training: the same scores with data ranks and with pipeline stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from neox.data import IndexedDatasetBuilder
from neox.metrics import read_metrics
from neox.plan import RunPlan
from tests.distributed.spawn import run_ranks
from tests.distributed.training_runs import VOCAB, tiny_plan


def write_data(directory: Path) -> dict[str, Any]:
    """Write a dataset of any tokens and one of equal tokens, and return the keys that read them."""
    random = np.random.default_rng(1)
    paths = {}
    for name, largest in (("mixed", VOCAB), ("equal", 1)):
        paths[name] = str(directory / name)
        with IndexedDatasetBuilder(paths[name], np.uint16) as builder:
            builder.add_documents(random.integers(0, largest, 1000), [20] * 50)
    sets = {"mixed": paths["mixed"], "equal": {"path": paths["equal"], "weight": 3}}
    return {"train_data_paths": [paths["mixed"]], "valid_data_paths": sets}


def train(plans: list[RunPlan]) -> None:
    """Train each plan, and write its metrics."""
    from neox.data.run_data import build_data_iterators
    from neox.engine import initialize_distributed, open_engine
    from neox.features.table import build_features
    from neox.tokenizer import build_tokenizer
    from neox.train.trainer import Trainer

    tokenizer = build_tokenizer("CharLevelTokenizer", None)
    for plan in plans:
        grid, device = initialize_distributed(plan)
        engine = open_engine(plan, grid, device, build_features)
        data = build_data_iterators(plan, grid.dp_rank, engine.iteration, tokenizer=tokenizer)
        assert Trainer(plan, engine, data).fit() == 0


def evaluations(directory: Path, kind: str = "validation") -> list[dict[str, float]]:
    rows = []
    for row in read_metrics(directory / "metrics.jsonl"):
        if row["kind"] == kind:
            rows.append({name: value for name, value in row.items() if not name.startswith(("kind", "timers/"))})
    return rows


def test_both_engines_report_every_set(tmp_path: Path) -> None:
    keys = {"train_iters": 4, "eval_interval": 2, "eval_iters": 2, "eval_at_start": True, "num_workers": 2}
    keys |= {"ema_decay": 0.9, "eval_ema": True}
    keys |= write_data(tmp_path)
    layouts = {"data": {"zero": 1}, "stages": {"pp": 2}}
    plans = [tiny_plan(2, **layout, **keys, log_dir=str(tmp_path / name)) for name, layout in layouts.items()]
    run_ranks(2, train, plans)
    found = evaluations(tmp_path / "data")
    assert [row["iteration"] for row in found] == [0, 2, 4]
    for row, other in zip(found, evaluations(tmp_path / "stages"), strict=True):
        assert row == pytest.approx(other, rel=1e-4)
        mixed = row["validation/mixed/lm_loss"]
        equal = row["validation/equal/lm_loss"]
        assert abs(mixed - equal) > 1e-3
        assert row["validation/lm_loss"] == pytest.approx(mixed / 4 + 3 * equal / 4)
        assert row["validation/equal/lm_loss_ppl"] == pytest.approx(np.exp(equal))
    averaged = evaluations(tmp_path / "data", "validation_ema")
    for row, other in zip(averaged, evaluations(tmp_path / "stages", "validation_ema"), strict=True):
        assert row == pytest.approx(other, rel=1e-4)
    at_start, *_, at_end = [row["validation_ema/mixed/lm_loss"] for row in averaged]
    assert at_start == pytest.approx(found[0]["validation/mixed/lm_loss"]), "the same batches"
    assert at_end != found[-1]["validation/mixed/lm_loss"]
    assert (tmp_path / "stages" / "loss.png").exists()
