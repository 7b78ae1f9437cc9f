"""A run that changes its degrees, its ZeRO stage or its precision at every resume goes on as if it had not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from neox.plan import RunPlan
from tests.distributed.spawn import run_ranks
from tests.distributed.training_runs import batches, legal_layouts, tiny_plan

STEPS = 2  # between resumes


def relay(plans: Sequence[RunPlan], steps: int) -> list[tuple[float, float]]:
    """Train `steps` under each plan in turn, each loading what the one before saved: (loss, loss scale) of each."""
    from neox.engine import initialize_distributed
    from neox.engine.checkpoints.loading import open_engine
    from neox.engine.checkpoints.saving import save_checkpoint

    losses = []
    for plan in plans:
        grid, device = initialize_distributed(plan)
        engine = open_engine(plan, grid, device)
        start = engine.iteration * plan.batch.gradient_accumulation_steps
        data = batches(plan, grid.dp_rank, start)
        results = [engine.train_batch(data) for _ in range(steps)]
        losses += [(result.loss, result.loss_scale) for result in results]
        save_checkpoint(engine, plan.config.checkpoint.save)
    return losses


def relay_and_still(
    relayed: Sequence[RunPlan], still: RunPlan
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """The losses of a relay, and those of an undisturbed run of the same length, in one set of processes."""
    return relay(relayed, STEPS), relay([still], STEPS * len(relayed))


def pairs(plans: Sequence[RunPlan], load_plans: Sequence[RunPlan], steps: int) -> list[list[float]]:
    """Losses after resuming each saved plan under each loading plan: row per pair, the undisturbed run's first."""
    from neox.engine import initialize_distributed
    from neox.engine.checkpoints.loading import open_engine
    from neox.engine.checkpoints.saving import save_checkpoint

    rows = []
    for plan in plans:
        grid, device = initialize_distributed(plan)
        engine = open_engine(plan, grid, device)
        data = batches(plan, grid.dp_rank)
        for _ in range(3):
            engine.train_batch(data)
        save_checkpoint(engine, plan.config.checkpoint.save)
        rows.append([engine.train_batch(data).loss for _ in range(steps)])
    for plan in load_plans:
        grid, device = initialize_distributed(plan)
        engine = open_engine(plan, grid, device)
        data = batches(plan, grid.dp_rank, engine.iteration * plan.batch.gradient_accumulation_steps)
        rows.append([engine.train_batch(data).loss for _ in range(steps)])
    return rows


def worst(losses: Sequence[float], expected: Sequence[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))


def plan_of(world: int, layout: dict[str, Any], **keys: Any) -> RunPlan:
    return tiny_plan(world, pp=layout["pp"] if layout["pp"] > 1 else 0, mp=layout["mp"], zero=layout["zero"], **keys)


@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [
        ({"gpt_j_residual": True, "no_weight_tying": True}, 1e-6),
        # Layouts sum in another order, which 16 bits round differently.
        pytest.param({"precision": "bf16"}, 1e-3, marks=pytest.mark.slow),
        pytest.param(
            {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 3, "hysteresis": 1}},
            1e-3,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_every_layout_of_two_ranks_in_one_run(tmp_path, settings, tolerance):
    """pp, mp, dp and each ZeRO stage, each as what was saved and as what loads."""
    save = str(tmp_path / "relay")
    layouts = legal_layouts(2)
    order = layouts[::2] + layouts[1::2]
    if tolerance > 1e-6:  # fewer keep this short
        order = order[::3] + order[1::3]
    relayed = [plan_of(2, layout, save=save, load=save, **settings) for layout in order]
    still = plan_of(2, {"pp": 1, "mp": 1, "zero": 1}, save=str(tmp_path / "still"), **settings)
    got, expected = run_ranks(2, relay_and_still, relayed, still, timeout=300)[0]
    assert worst([loss for loss, _ in got], [loss for loss, _ in expected]) < tolerance
    assert [scale for _, scale in got] == [scale for _, scale in expected]


def test_precision_changes(tmp_path):
    """fp32 -> bf16 -> fp32 keeps the fp32 weights that bf16 training carries, not their rounding."""
    save = str(tmp_path / "relay")
    layouts = [("fp32", 0, 1), ("bf16", 2, 1), ("fp32", 1, 2), ("bf16", 3, 1), ("fp32", 0, 2)]
    relayed = [tiny_plan(2, precision=p, zero=z, mp=mp, save=save, load=save) for p, z, mp in layouts]
    still = tiny_plan(2, precision="fp32", zero=1, save=str(tmp_path / "still"))
    got, expected = run_ranks(2, relay_and_still, relayed, still, timeout=240)[0]
    assert worst([loss for loss, _ in got], [loss for loss, _ in expected]) < 3e-3
