"""The plan's memory of experts that data ranks divide is what a step holds."""

from __future__ import annotations

import pytest

from benchmarks.memory import EXPERT_LAYOUTS, EXPERTS, device_of, plan_of, step_peaks
from neox.plan.devices.device import memory_on
from tests.distributed.spawn import run_ranks


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_layouts_of_experts_take_the_planned_memory(world: int, precision: str) -> None:
    layouts = [(keys, zero) for ranks, keys, zero in EXPERT_LAYOUTS if ranks == world]
    plans = [plan_of(world, precision, zero, **EXPERTS, **keys) for keys, zero in layouts]
    peaks = run_ranks(world, step_peaks, plans, timeout=1500)
    for number, plan in enumerate(plans):
        device = device_of(plan)
        planned = memory_on(plan, device).needed(on_cpu=device.shared)
        assert planned == pytest.approx(max(of_rank[number] for of_rank in peaks), rel=0.05), layouts[number]
