"""Stages of training data in training: the same curve in other layouts, and after a resume from what was read."""

from pathlib import Path

import numpy as np

from neox.data import IndexedDatasetBuilder
from tests.distributed.spawn import run_ranks
from tests.distributed.training_runs import GLOBAL_BATCH, SEQ, VOCAB, tiny_plan
from tests.features import feature_of

STEPS, SAVED_AT = 5, 3


def write_data(directory: Path) -> dict[str, object]:
    """Write two datasets, and return the keys that read them in two stages."""
    random = np.random.default_rng(1)
    paths = [str(directory / name) for name in ("a", "b")]
    for path in paths:
        sizes = random.integers(6, 30, 60)
        with IndexedDatasetBuilder(path, np.uint16) as builder:
            builder.add_documents(random.integers(0, VOCAB, sizes.sum()), sizes)
    stages = [{"weights": [1, 1], "seq_length": SEQ // 2}, {"start_step": 2, "weights": [1, 3]}]
    return {"train_data_paths": paths, "data_stages": stages}


def curves(plans):
    """(loss, gradient norm) of each step of each plan, from what its checkpoint has read on."""
    from neox.data.run_data import build_data_iterators
    from neox.engine import initialize_distributed, open_engine, save_checkpoint
    from neox.features.ledger.run import Ledger
    from neox.features.table import build_features
    from neox.tokenizer import build_tokenizer

    tokenizer = build_tokenizer("CharLevelTokenizer", None)

    def run(plan):
        grid, device = initialize_distributed(plan)
        engine = open_engine(plan, grid, device, build_features)
        data = build_data_iterators(
            plan, grid.dp_rank, engine.iteration, tokenizer=tokenizer, ledger=feature_of(engine, Ledger).record
        )
        feature_of(engine, Ledger).on_data(engine, data)
        steps = []
        while engine.iteration < STEPS:
            if plan.config.checkpoint.save and engine.iteration == SAVED_AT:
                save_checkpoint(engine, plan.config.checkpoint.save)
            result = engine.train_batch(data.train)
            steps.append((result.loss, result.grad_norm))
        return steps, feature_of(engine, Ledger).record

    return [run(plan) for plan in plans]


def test_curves_of_layouts_and_resumes(tmp_path):
    keys = {"train_iters": STEPS, "eval_iters": 0, "num_workers": 0, **write_data(tmp_path)}
    save = str(tmp_path / "save")
    plans = [
        tiny_plan(2, save=save, **keys),
        tiny_plan(2, pp=2, **keys),
        tiny_plan(2, pp=2, load=save, **keys),
        tiny_plan(2, pp=2, load=save, **{**keys, "data_stages": [{"weights": [1, 0]}]}),
    ]
    for answers in run_ranks(2, curves, plans, timeout=300):
        (whole, _), (staged, _), (resumed, ledger), (changed, _) = answers
        np.testing.assert_allclose(staged, whole, rtol=2e-5)
        np.testing.assert_allclose(resumed, whole[SAVED_AT:], rtol=2e-5)
        assert ledger["samples"] == GLOBAL_BATCH * SAVED_AT
        assert abs(changed[0][0] - resumed[0][0]) > 1e-4
