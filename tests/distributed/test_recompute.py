"""Recomputation of blocks or of their parts: the losses of the same layout without it, in both engines."""

import pytest

from tests.distributed.spawn import run_ranks
from tests.distributed.training_runs import batches, tiny_plan

DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
LAYOUTS = {
    "stages": {"pp": 2},
    "tensor ranks": {"mp": 2, "gpt_j_residual": True},
    "ZeRO 3": {"zero": 3, "pos_emb": "rpe"},
}
PARTS = {
    "full": {"no_recompute_layers": [1]},
    "full_attn": {"recompute_granularity": "full_attn"},
    "core_attn": {"recompute_granularity": "core_attn", "no_recompute_layers": [0]},
}


def losses_of(plans):
    """Losses of two steps of each plan on this rank."""
    from neox.engine import initialize_distributed, initialize_engine

    answers = []
    for plan in plans:
        grid, device = initialize_distributed(plan)
        engine = initialize_engine(plan, grid, device)
        data = batches(plan, grid.dp_rank)
        answers.append([engine.train_batch(data).loss for _ in range(2)])
    return answers


@pytest.mark.parametrize(
    "layout", ["stages", *(pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS if name != "stages")]
)
def test_losses_are_equal(layout):
    plans = [tiny_plan(2, **LAYOUTS[layout], **DROPOUT)]
    plans += [tiny_plan(2, **LAYOUTS[layout], **DROPOUT, checkpoint_activations=True, **how) for how in PARTS.values()]
    plain, *recomputed = run_ranks(2, losses_of, plans)[0]
    assert recomputed == [plain] * len(PARTS)
