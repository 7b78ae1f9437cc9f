"""Trainings with MLPs in tiles of tokens, whatever is divided, have the losses of the same layout without tiles."""

from __future__ import annotations

from typing import Any

import pytest

from neox.plan import RunPlan
from tests.distributed.spawn import run_ranks
from tests.distributed.training_runs import tiny_plan, train_curve

LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor ranks": {"mp": 2, "gpt_j_residual": True, "checkpoint_activations": True},
    "shares of tokens": {"mp": 2, "sequence_parallel": True, "norm": "scalenorm"},
    "ZeRO 3": {"zero": 3},
    "context ranks": {"context_parallel_size": 2, "zero": 1},
    "stages": {"pp": 2},
}


def curves(plans: list[RunPlan]) -> list[list[tuple[float, float]]]:
    return [train_curve(plan, 3) for plan in plans]


@pytest.mark.parametrize(
    "names",
    [("shares of tokens", "ZeRO 3"), pytest.param(tuple(LAYOUTS), marks=pytest.mark.slow)],
    ids=["two", "all"],
)
def test_losses_are_those_without_tiles(names: tuple[str, ...]) -> None:
    plans = []
    for name in names:
        for size in (None, 3):
            plans.append(tiny_plan(2, num_layers=2, **LAYOUTS[name], mlp_tile_size=size))
    found = run_ranks(2, curves, plans, timeout=500)[0]
    for name, whole, tiled in zip(names, found[::2], found[1::2], strict=True):
        for (loss, norm), (tiled_loss, tiled_norm) in zip(whole, tiled, strict=True):
            assert tiled_loss == pytest.approx(loss, rel=2e-6), name
            assert tiled_norm == pytest.approx(norm, rel=2e-5), name
