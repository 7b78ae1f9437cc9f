"""The same initial weights and data under every kind of layout give the same curve, clipping on, in fp32."""

import functools

import pytest

from tests.distributed.spawn import run_ranks
from tests.distributed.training_runs import FULL_MATRIX, legal_layouts, tiny_plan, train_curves

STEPS = 10  # twice as many in the slow tests
TOLERANCE = 1e-5

# One of each kind; all layouts of one to four ranks are in the slow tests.
FAST = {
    1: [{"zero": 1}],
    2: [{"pp": 2}, {"mp": 2, "zero": 2}, {"zero": 1}, {"zero": 3}],
    4: [{"pp": 2, "mp": 2, "zero": 1}],
}


@functools.cache
def reference(steps, **keys) -> list[tuple[float, float]]:
    """The curve of one rank with ZeRO 0."""
    return run_ranks(1, train_curves, [tiny_plan(1, **keys)], steps)[0][0]


def assert_equal_curves(world, layouts, steps=STEPS, **keys):
    """Train each layout and compare losses and gradient norms with one rank's."""
    expected = reference(steps, **keys)
    plans = [tiny_plan(world, **layout, **keys) for layout in layouts]
    per_rank = run_ranks(world, train_curves, plans, steps, timeout=500)
    assert all(curves == per_rank[0] for curves in per_rank), "ranks report different numbers"
    for layout, curve in zip(layouts, per_rank[0], strict=True):
        for step, ((loss, norm), (loss_1, norm_1)) in enumerate(zip(curve, expected, strict=True)):
            assert loss == pytest.approx(loss_1, rel=TOLERANCE), (world, layout, step)
            assert norm == pytest.approx(norm_1, rel=1e-4), (world, layout, step)
    assert expected[-1][0] < expected[0][0] - 0.3
    assert max(norm for _, norm in expected) > 0.5, "clipping is not exercised"


@pytest.mark.parametrize("world", FAST)
def test_curves_are_equal(world):
    assert_equal_curves(world, FAST[world])


def test_curves_are_equal_with_an_untied_row_parallel_head_and_recomputation():
    keys = {
        "no_weight_tying": True,
        "gpt_j_residual": True,
        "checkpoint_activations": True,
        "checkpoint_num_layers": 2,
        "train_micro_batch_size_per_gpu": 2,
    }
    assert_equal_curves(2, [{"pp": 2}, {"mp": 2, "zero": 1}], **keys)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("tied", [True, False])
def test_all_layouts_are_equal(world, tied):
    assert_equal_curves(world, legal_layouts(world), 2 * STEPS, **FULL_MATRIX, no_weight_tying=not tied)
