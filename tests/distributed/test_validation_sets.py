"""Validation sets in training: the same scores with data ranks and with pipeline stages; whole sets as transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from neox.config import NeoXConfig
from neox.convert import from_hf
from neox.data import IndexedDataset, IndexedDatasetBuilder
from neox.metrics import read_metrics
from neox.plan import RunPlan, config_from_files, resolve
from tests.distributed.spawn import run_ranks
from tests.distributed.training_runs import SEQ, VOCAB, tiny_plan
from tests.parity.family_configs import COMMON
from tests.parity.test_hf_families import CASES, transformers_model

LONG = SEQ + 1
SHORT = 5


def write_data(directory: Path) -> dict[str, Any]:
    """Write long documents of any tokens and short ones of two, and return the keys that read one in each row."""
    random = np.random.default_rng(1)
    paths = {}
    for name, smallest, largest, length in (("mixed", 0, VOCAB, LONG), ("equal", 1, 3, SHORT)):
        paths[name] = str(directory / name)
        with IndexedDatasetBuilder(paths[name], np.uint16) as builder:
            builder.add_documents(random.integers(smallest, largest, 50 * length), [length] * 50)
    sets = {"mixed": paths["mixed"], "equal": {"path": paths["equal"], "weight": 3}}
    return {"train_data_paths": [paths["mixed"]], "valid_data_paths": sets, "pack_impl": "unpacked"}


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
    keys |= {"ema_decay": 0.9, "eval_ema": True, "char_level_ppl": True, "tokenizer_type": "CharLevelTokenizer"}
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
        nats = 0.0
        characters = 0.0
        for name, labels in (("mixed", LONG - 1), ("equal", 3 * (SHORT - 1))):  # the rest of a row is padding
            loss = row[f"validation/{name}/lm_loss"]
            nats += labels * loss
            characters += labels * loss / np.log(row[f"validation/{name}/lm_loss_char_ppl"])
        assert row["validation/lm_loss_char_ppl"] == pytest.approx(np.exp(nats / characters), rel=1e-4)
    averaged = evaluations(tmp_path / "data", "validation_ema")
    for row, other in zip(averaged, evaluations(tmp_path / "stages", "validation_ema"), strict=True):
        assert row == pytest.approx(other, rel=1e-4)
    at_start, *_, at_end = [row["validation_ema/mixed/lm_loss"] for row in averaged]
    assert at_start == pytest.approx(found[0]["validation/mixed/lm_loss"]), "the same batches"
    assert at_end != found[-1]["validation/mixed/lm_loss"]
    assert (tmp_path / "stages" / "loss.png").exists()


SAMPLES = 23
LEFT = 5
"""Tokens behind the last whole sample of a set, which are not read."""


def write_document(path: Path, samples: int, length: int) -> str:
    """Write one document: nothing is shuffled, so where its samples begin is known."""
    random = np.random.default_rng(5)
    tokens = samples * length + 1 + LEFT
    with IndexedDatasetBuilder(path, np.uint16) as builder:
        builder.add_documents(random.integers(0, VOCAB, tokens), [tokens])
    return str(path)


def mean_over_set(model: Any, path: str, samples: int, length: int) -> float:
    """Return the mean cross entropy of transformers' model over all labels of a set, one sample after the other."""
    stream = torch.from_numpy(IndexedDataset(path)[0].astype(np.int64))
    total = 0.0
    with torch.no_grad():
        for sample in range(samples):
            row = stream[sample * length : (sample + 1) * length + 1]
            logits = model(row[:-1].unsqueeze(0)).logits[0]
            total += float(torch.nn.functional.cross_entropy(logits, row[1:], reduction="sum"))
    return total / (samples * length)


def test_one_pass_over_a_set_is_the_mean_over_its_tokens_in_every_layout(tmp_path: Path) -> None:
    """Micro batches, data ranks and steps that do not divide the set's 23 samples count each of them once."""
    reference = transformers_model("gpt_neox", **CASES["gpt_neox"]).eval()
    reference.save_pretrained(tmp_path / "hf")
    imported = from_hf(tmp_path / "hf", tmp_path / "neox")
    paths = {"long": write_document(tmp_path / "long", SAMPLES, SEQ), "one": write_document(tmp_path / "one", 1, SEQ)}
    flat = config_from_files([imported.config_file]).to_flat() | {
        "load": str(tmp_path / "neox"),
        "finetune": True,
        "seq_length": SEQ,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
        "train_iters": 1,
        "eval_at_start": True,
        "eval_interval": 5,
        "eval_iters": "all",
        "num_workers": 2,
        "train_data_paths": [paths["long"]],
        "valid_data_paths": paths,
    }

    def plan(world: int, name: str, micro: int, batch: int, **layout: Any) -> RunPlan:
        sizes = {"train_micro_batch_size_per_gpu": micro, "train_batch_size": batch, "log_dir": str(tmp_path / name)}
        return resolve(NeoXConfig.from_flat({**flat, **sizes, **layout}), world, COMMON["vocab_size"])

    stages = {"pipe_parallel_size": 2}
    run_ranks(2, train, [plan(2, "data", 2, 8), plan(2, "wide", 16, 32), plan(2, "stages", 3, 6, **stages)])
    expected = {name: mean_over_set(reference, paths[name], n, SEQ) for name, n in (("long", SAMPLES), ("one", 1))}
    for layout in ("data", "wide", "stages"):
        at_start = evaluations(tmp_path / layout)[0]
        for name, value in expected.items():
            assert at_start[f"validation/{name}/lm_loss"] == pytest.approx(value, rel=2e-6), (layout, name)
        assert at_start["validation/long/tokens"] == SAMPLES * SEQ
        assert at_start["validation/lm_loss"] == pytest.approx(sum(expected.values()) / 2, rel=2e-6)
