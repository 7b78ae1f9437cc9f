"""Training of added tokens only: every other weight stays bit for bit, in every layout."""

from __future__ import annotations

import pytest

from tests.distributed.spawn import run_ranks
from tests.distributed.training_runs import VOCAB, batches, tiny_plan

TOKENS = ["<a>", "<b>", "<c>"]
KEYS = {"added_tokens": TOKENS, "train_only_added_tokens": True, "weight_decay": 0.1, "warmup": 0.0}
VOCABULARY = ("word_embeddings.weight", "final_linear.weight")


def trained_rows(plan, steps):
    """Train; return for each changed parameter the changed rows of the whole parameter, and the losses."""
    from neox.engine import initialize_distributed, initialize_engine
    from neox.engine.weights import gathered

    grid, device = initialize_distributed(plan)
    engine = initialize_engine(plan, grid, device)
    module = engine.deepspeed_engine.module
    with gathered(module):
        before = {name: p.detach().clone() for name, p in module.named_parameters()}
    data = batches(plan, grid.dp_rank)
    losses = [engine.train_batch(data).loss for _ in range(steps)]
    changed = {}
    with gathered(module):
        for name, p in module.named_parameters():
            rows = (p != before[name]).flatten(1).any(1) if p.dim() > 1 else p != before[name]
            if rows.any():
                is_divided = p.shape[0] < plan.padded_vocab_size
                offset = grid.tp_rank * p.shape[0] if is_divided else 0
                changed[name] = [offset + int(row) for row in rows.nonzero()]
    return changed, losses


def all_trained_rows(plans, steps):
    return [trained_rows(plan, steps) for plan in plans]


def assert_only_new_rows(world, plans, steps=3):
    expected = set(range(VOCAB - len(TOKENS), VOCAB))
    ranks = run_ranks(world, all_trained_rows, plans, steps, timeout=500)
    curves = [losses for _, losses in ranks[0]]
    for number, plan in enumerate(plans):
        changed: dict[str, set[int]] = {}
        for rank in ranks:
            for name, rows in rank[number][0].items():
                assert name.endswith(VOCABULARY), name
                changed.setdefault(name.rsplit(".", 2)[1], set()).update(rows)
        heads = 1 if plan.architecture.tie_word_embeddings else 2
        assert len(changed) == heads, plan.grid
        assert all(rows == expected for rows in changed.values()), (plan.grid, changed)
    return curves


@pytest.mark.parametrize("untied", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_layouts_train_the_same_rows(untied):
    keys = {**KEYS, "no_weight_tying": untied}
    layouts = [{"mp": 2}, {"pp": 2}, {"zero": 1}, {"zero": 3}]
    whole = assert_only_new_rows(1, [tiny_plan(1, **keys)])[0]
    for curve in assert_only_new_rows(2, [tiny_plan(2, **layout, **keys) for layout in layouts]):
        assert curve == pytest.approx(whole, rel=1e-5)


@pytest.mark.slow
def test_layouts_of_16_bits_train_the_same_rows():
    keys = {**KEYS, "no_weight_tying": True, "output_layer_parallelism": "row", "bf16": {"enabled": True}}
    layouts = [{"mp": 2}, {"pp": 2}, {"zero": 1}, {"zero": 2}, {"zero": 3}]
    assert_only_new_rows(2, [tiny_plan(2, **layout, **keys) for layout in layouts])
