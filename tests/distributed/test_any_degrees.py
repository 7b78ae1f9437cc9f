"""A run that changes its degrees, its ZeRO stage or its precision at every resume goes on as if it had not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from neox.config import RunPlan
from tests.distributed.spawn import run_ranks
from tests.distributed.training_runs import batches, legal_layouts, tiny_plan

STEPS = 2  # between resumes


def relay(plans: Sequence[RunPlan], steps: int) -> list[float]:
    """Train `steps` under each plan in turn, each loading what the one before saved; return every step's loss."""
    from neox.engine import initialize_distributed
    from neox.engine.loading import open_engine
    from neox.engine.saving import save_checkpoint

    losses = []
    for plan in plans:
        grid, device = initialize_distributed(plan)
        engine = open_engine(plan, grid, device)
        start = engine.iteration * plan.batch.gradient_accumulation_steps
        data = batches(plan, grid.dp_rank, start)
        losses += [engine.train_batch(data).loss for _ in range(steps)]
        save_checkpoint(engine, plan.config.checkpoint.save)
    return losses


def pairs(plans: Sequence[RunPlan], load_plans: Sequence[RunPlan], steps: int) -> list[list[float]]:
    """Losses after resuming each saved plan under each loading plan: row per pair, the undisturbed run's first."""
    from neox.engine import initialize_distributed
    from neox.engine.loading import open_engine
    from neox.engine.saving import save_checkpoint

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


@pytest.mark.parametrize("settings", [{"gpt_j_residual": True, "no_weight_tying": True}, {"precision": "bf16"}])
def test_every_layout_of_two_ranks_in_one_run(tmp_path, settings):
    """pp, mp, dp and each ZeRO stage, as source and as target; untied with parallel residual, and tied."""
    save = str(tmp_path / "relay")
    layouts = legal_layouts(2)
    order = layouts[::2] + layouts[1::2]
    relayed = [plan_of(2, layout, save=save, load=save, **settings) for layout in order]
    still = [plan_of(2, {"pp": 1, "mp": 1, "zero": 1}, save=str(tmp_path / "still"), **settings)]
    tolerance = 2e-2 if settings.get("precision") == "bf16" else 1e-5
    got = run_ranks(2, relay, relayed, STEPS, timeout=240)[0]
    expected = run_ranks(2, relay, still, STEPS * len(order), timeout=120)[0]
    assert worst(got, expected) < tolerance
