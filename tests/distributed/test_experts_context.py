"""Experts whose tokens context ranks divide train as on one rank: losses, choices, gradients, and what is dropped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.spawn import run_ranks
from tests.distributed.test_context_gradients import check_gradients
from tests.distributed.test_experts import BIASED, DIVIDED, EXPERTS, RECOMPUTED, SAVED_AT, curves, resumed
from tests.distributed.training_runs import tiny_plan

CONTEXT: dict[str, Any] = {"context_parallel_size": 2}
BY_HEADS = {**CONTEXT, "context_parallel_kind": "ulysses"}
DROPPING = {"moe_expert_capacity_factor": 0.75}
PADDED = {**BIASED, **DROPPING, "pack_impl": "pack_until_overflow"}
OVER_MICRO_BATCHES = {**EXPERTS, "moe_router_load_balancing_type": "aux_loss", "train_micro_batch_size_per_gpu": 2}
SINKHORN = {"moe_num_experts": 4, "moe_top_k": 1, "moe_z_loss_coeff": 0.01, **DROPPING}


def check(world: int, layouts: list[dict[str, Any]], **network: Any) -> None:
    """Compare each layout's scores and norms, and those of an evaluation, with one rank's."""
    ((expected,),) = run_ranks(1, curves, [tiny_plan(1, **network)])
    if "moe_expert_capacity_factor" in network:
        assert 0 < expected[0]["moe_dropped"] < 0.5
    for found in run_ranks(world, curves, [tiny_plan(world, **network, **layout) for layout in layouts]):
        for layout, curve in zip(layouts, found, strict=True):
            for step, (ours, theirs) in enumerate(zip(curve, expected, strict=True)):
                assert ours == pytest.approx(theirs, rel=2e-6, abs=1e-8), (layout, step)


def test_context_ranks_route_as_one_rank() -> None:
    check(2, [{**CONTEXT, "zero": 1}, {**CONTEXT, **DIVIDED}], **PADDED)


SLOW: dict[str, tuple[int, list[dict[str, Any]], dict[str, Any]]] = {
    "plain": (
        2,
        [CONTEXT, {**BY_HEADS, **RECOMPUTED}, {**CONTEXT, "zero": 3}, {**CONTEXT, **DIVIDED, "zero": 3}],
        EXPERTS,
    ),
    "over micro batches": (2, [CONTEXT, {**BY_HEADS, "zero": 1}], OVER_MICRO_BATCHES),
    "sinkhorn": (2, [CONTEXT, {**BY_HEADS, **RECOMPUTED}], SINKHORN),
    "padded": (2, [BY_HEADS, {**CONTEXT, **RECOMPUTED}], PADDED),
    "four": (
        4,
        [
            {**CONTEXT, "mp": 2, "sequence_parallel": True},
            {**CONTEXT, "pp": 2, "zero": 1},
            {**CONTEXT, **DIVIDED, "pp": 2},
            {"context_parallel_size": 4, **DIVIDED, "zero": 2},
            {**CONTEXT, "expert_model_parallel_size": 4, "zero": 1},
        ],
        PADDED,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_every_layout_with_context_ranks_trains_the_same(name: str) -> None:
    world, layouts, network = SLOW[name]
    check(world, layouts, **network)


@pytest.mark.slow
def test_each_gradient_is_that_of_one_rank() -> None:
    """Those of routers and experts among them, with a loss for balance large enough to be seen."""
    check_gradients(2, **{**EXPERTS, "moe_expert_interval": 1, "moe_aux_loss_coeff": 1.0})


@pytest.mark.slow
def test_a_run_goes_on_with_other_context_and_expert_degrees(tmp_path: Path) -> None:
    saving = [tiny_plan(2, **EXPERTS, **CONTEXT, **DIVIDED, zero=1, save=str(tmp_path / "divided"))]
    saving.append(tiny_plan(2, **EXPERTS, zero=2, save=str(tmp_path / "whole")))
    loading = []
    for name in ("divided", "whole"):
        for layout in ({**CONTEXT, "zero": 2}, {**BY_HEADS, **DIVIDED}, {"zero": 1}):
            loading.append(tiny_plan(2, **EXPERTS, **layout, load=str(tmp_path / name)))
    for curves_of_rank in run_ranks(2, resumed, saving + loading):
        undisturbed = curves_of_rank[0][SAVED_AT:]
        for resumed_curve in curves_of_rank[2:]:
            assert len(resumed_curve) == len(undisturbed)
            for ours, theirs in zip(resumed_curve, undisturbed, strict=True):
                assert ours == pytest.approx(theirs, rel=2e-6, abs=1e-8)
