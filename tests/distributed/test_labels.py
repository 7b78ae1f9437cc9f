"""Files of labels in training: the same curve with and without pipeline stages, and after a resume."""

from pathlib import Path

import numpy as np
import pytest

from neox.data import IndexedDatasetBuilder
from tests.distributed.spawn import run_ranks
from tests.distributed.training_runs import SEQ, VOCAB, tiny_plan

STEPS, SAVED_AT = 4, 2


def write_data(directory: Path) -> dict[str, list[str]]:
    """40 documents of 6 to 30 tokens, of which every third is counted, and the keys that name them."""
    random = np.random.default_rng(1)
    names = {"train_data_paths": directory / "text", "train_label_data_paths": directory / "label"}
    with (
        IndexedDatasetBuilder(names["train_data_paths"], np.uint16) as texts,
        IndexedDatasetBuilder(names["train_label_data_paths"], np.int32) as labels,
    ):
        for size in random.integers(6, 30, 40).tolist():
            ids = random.integers(0, VOCAB, size)
            texts.add_document(ids)
            labels.add_document(np.where(np.arange(size) % 3 == 2, ids, -100))
    return {key: [str(path)] for key, path in names.items()}


def curves(plans, resumed_plan):
    """(loss, gradient norm) of each step of each plan; the first saves, and the resumed plan goes on from there."""
    from neox.data.run_data import build_data_iterators
    from neox.engine import initialize_distributed, open_engine, save_checkpoint
    from neox.tokenizer import build_tokenizer

    tokenizer = build_tokenizer("CharLevelTokenizer", None)

    def run(plan):
        grid, device = initialize_distributed(plan)
        engine = open_engine(plan, grid, device)
        data = build_data_iterators(plan, grid.dp_rank, engine.iteration, tokenizer=tokenizer).train
        steps = []
        while engine.iteration < STEPS:
            if plan.config.checkpoint.save and engine.iteration == SAVED_AT:
                save_checkpoint(engine, plan.config.checkpoint.save)
            result = engine.train_batch(data)
            steps.append((result.loss, result.grad_norm))
        return steps

    return [run(plan) for plan in (*plans, resumed_plan)]


@pytest.mark.parametrize("impl", ["unpacked", pytest.param("packed", marks=pytest.mark.slow)])
def test_labels_through_both_engines_and_a_resume(tmp_path, impl):
    keys = {"train_iters": STEPS, "eval_iters": 0, "pack_impl": impl, "num_workers": 0, **write_data(tmp_path)}
    save = str(tmp_path / "save")
    staged, plain = tiny_plan(2, pp=2, save=save, **keys), tiny_plan(2, **keys)
    unlabelled = tiny_plan(2, **{**keys, "train_label_data_paths": None})
    resumed_plan = tiny_plan(2, pp=2, load=save, **keys)
    assert staged.config.model.seq_length == SEQ
    for answers in run_ranks(2, curves, [staged, plain, unlabelled], resumed_plan, timeout=300):
        with_stages, without, all_counted, resumed = answers
        np.testing.assert_allclose(with_stages, without, rtol=2e-5)
        assert resumed == with_stages[SAVED_AT:]
        assert abs(with_stages[0][0] - all_counted[0][0]) > 1e-3
