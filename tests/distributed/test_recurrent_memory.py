"""The plan's memory of recurrent networks is what a step holds, also for shapes that no formula was fitted to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from benchmarks.memory import device_of, plan_of, step_peaks
from neox.model import mamba
from neox.plan import RunPlan
from neox.plan.devices.device import memory_on
from neox.plan.memory.estimate import stage_memory
from tests.distributed.spawn import run_ranks

# Few blocks with wide mixers, so that activations count.
NETWORKS: dict[str, dict[str, Any]] = {
    "mamba": {
        "attention_config": [[["mamba"], "all"]],
        "mamba_width": 640,
        "mamba_state_dim": 24,
        "mamba_conv_width": 3,
        "num_layers": 2,
    },
    "mamba2": {
        "attention_config": [[["mamba2"], "all"]],
        "num_layers": 2,
        "mamba_num_heads": 20,
        "mamba_head_dim": 40,
        "mamba_state_dim": 48,
        "mamba_num_groups": 4,
    },
    "bamba": {
        "attention_config": [[["flash", "mamba2_mlp"], "all"]],
        "mamba_num_heads": 24,
        "mamba_head_dim": 24,
        "mamba_state_dim": 80,
        "norm": "rmsnorm",
        "activation": "swiglu",
        "mlp_width": 448,
    },
    "gated_delta": {
        "attention_config": [[["gated_delta"], "all"]],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 80,
        "linear_value_head_dim": 112,
        "norm": "rmsnorm",
    },
    "rwkv": {"attention_config": [[["rwkv"], "all"]], "dim_att": 480, "num_attention_heads": 12, "ffn_dim": 704},
}
# Two blocks each, with shapes that no coefficient was fitted to.
SHALLOW: dict[str, dict[str, Any]] = {
    "mamba": {"attention_config": [[["mamba"], "all"]], "mamba_width": 896, "mamba_state_dim": 12, "mamba_dt_rank": 40},
    "mamba2": {
        "attention_config": [[["mamba2"], "all"]],
        "mamba_num_heads": 14,
        "mamba_head_dim": 48,
        "mamba_state_dim": 96,
        "mamba_num_groups": 2,
    },
    "hybrid": {
        "attention_config": [[["flash", "mamba2_mlp"], "all"]],
        "mamba_num_heads": 10,
        "mamba_head_dim": 56,
        "mamba_state_dim": 40,
        "mlp_width": 640,
    },
    "gated_delta": {
        "attention_config": [[["gated_delta"], "all"]],
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 72,
        "linear_value_head_dim": 144,
        "activation": "swiglu",
        "mlp_width": 384,
    },
    "rwkv": {"attention_config": [[["rwkv"], "all"]], "dim_att": 384, "num_attention_heads": 6, "ffn_dim": 960},
}
LAYOUTS: list[tuple[int, str, dict[str, Any], dict[str, Any]]] = [
    (1, "fp32", {"stage": 0}, {}),
    (1, "bf16", {"stage": 1}, {"reset_attention_mask": True}),
    (2, "bf16", {"stage": 2}, {}),
    (2, "fp32", {"stage": 1}, {"model_parallel_size": 2}),
    (2, "bf16", {"stage": 3}, {}),
]
STAGES: list[tuple[int, str, dict[str, Any], dict[str, Any]]] = [
    (2, precision, {"stage": stage}, {}) for precision in ("fp32", "bf16") for stage in (0, 1, 2, 3)
]


SCAN = mamba._scan


class VisibleScan(torch.autograd.Function):
    """Mamba's scan with the same functions, but not as one operation, whose inside the measurement does not see."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        """Run the forward pass."""
        x, dt, decay, b, c, _, starts, chunk = inputs
        y, last, befores = SCAN._init_fn(*inputs)
        ctx.save_for_backward(x, dt, decay, b, c, befores, starts)
        ctx.chunk = chunk
        ctx.mark_non_differentiable(befores)
        return y, last, befores

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_last: Tensor, _: Tensor) -> tuple[Any, ...]:
        """Run the backward pass."""
        *saved, befores, starts = ctx.saved_tensors
        return (*mamba._scan_backward._init_fn(grad, grad_last, *saved, befores, starts, ctx.chunk), None, None)


def visible_peaks(plans: Sequence[RunPlan]) -> list[int]:
    """Return the peak bytes of a step of each plan on this rank."""
    with mock.patch.object(mamba, "_scan", VisibleScan.apply):
        return step_peaks(plans)


def check(network: dict[str, Any], layouts: list[tuple[int, str, dict[str, Any], dict[str, Any]]]) -> None:
    """Compare the plan with the fullest rank's step, and report all that differ by more than 5 %."""
    off = []
    for world in (1, 2):
        cases = [layout[1:] for layout in layouts if layout[0] == world]
        plans = [plan_of(world, precision, zero, **{**network, **keys}) for precision, zero, keys in cases]
        if not plans:
            continue
        peaks = run_ranks(world, visible_peaks, plans, timeout=1500)
        for number, plan in enumerate(plans):
            device = device_of(plan)
            planned = memory_on(plan, device).needed(on_cpu=device.shared)
            held = max(of_rank[number] for of_rank in peaks)
            if planned != pytest.approx(held, rel=0.05):
                off.append((*cases[number], f"{planned / held - 1:+.1%}"))
    assert off == []


def test_a_recurrent_network_takes_the_planned_memory() -> None:
    check(NETWORKS["mamba2"], LAYOUTS[:1])


@pytest.mark.slow
@pytest.mark.parametrize("network", NETWORKS)
def test_recurrent_networks_take_the_planned_memory(network: str) -> None:
    check({"num_layers": 4, **NETWORKS[network]}, LAYOUTS)


@pytest.mark.slow
@pytest.mark.parametrize("network", SHALLOW)
def test_two_blocks_take_the_planned_memory_in_every_stage_of_zero(network: str) -> None:
    check({"num_layers": 2, **SHALLOW[network]}, STAGES)


def test_fp32_decays_are_counted_on_the_stage_that_has_them() -> None:
    blocks = ["mamba", "mamba", "flash", "flash"]
    keys = {"attention_config": blocks, "mamba_width": 640, "mamba_state_dim": 24, "num_layers": 4}
    weights = []
    for stays_fp32 in (True, False):
        plan = plan_of(2, "bf16", {"stage": 0}, mamba_selective_fp32_params=stays_fp32, pipe_parallel_size=2, **keys)
        weights.append([stage_memory(plan.workload, stage).weights for stage in plan.stages])
    fp32, rounded = weights
    bytes_of_decays = 4 * 2 * (640 * 24 + 640)  # A_log and D of two blocks
    assert [one - other for one, other in zip(fp32, rounded, strict=True)] == [bytes_of_decays, 0]
