"""The plan's memory of recurrent networks is what a step holds, also for shapes that no formula was fitted to."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.memory import device_of, plan_of, step_peaks
from neox.plan.devices.device import memory_on
from tests.distributed.spawn import run_ranks

# Few blocks with wide mixers, so that activations count.
NETWORKS: dict[str, dict[str, Any]] = {
    "mamba": {"attention_config": [[["mamba"], 2]], "mamba_width": 640, "mamba_state_dim": 24, "mamba_conv_width": 3},
    "mamba2": {
        "attention_config": [[["mamba2"], 2]],
        "mamba_num_heads": 20,
        "mamba_head_dim": 40,
        "mamba_state_dim": 48,
        "mamba_num_groups": 4,
    },
    "bamba": {
        "attention_config": ["mamba2_mlp", "flash"],
        "mamba_num_heads": 24,
        "mamba_head_dim": 24,
        "mamba_state_dim": 80,
        "norm": "rmsnorm",
        "activation": "swiglu",
        "intermediate_size": 448,
    },
    "gated_delta": {
        "attention_config": ["gated_delta", "gated_delta"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 80,
        "linear_value_head_dim": 112,
        "norm": "rmsnorm",
    },
    "rwkv": {"attention_config": [[["rwkv"], 2]], "dim_att": 480, "head_size": 40, "ffn_dim": 704},
}
LAYOUTS: list[tuple[int, str, dict[str, Any], dict[str, Any]]] = [
    (1, "fp32", {"stage": 0}, {}),
    (1, "bf16", {"stage": 1}, {"reset_attention_mask": True}),
    (2, "bf16", {"stage": 2}, {}),
    (2, "fp32", {"stage": 1}, {"model_parallel_size": 2}),
    (2, "bf16", {"stage": 3}, {}),
]


def check(networks: list[str], layouts: list[tuple[int, str, dict[str, Any], dict[str, Any]]]) -> None:
    """Compare the plan with the fullest rank's step, and report all that differ by more than 5 %."""
    off = []
    for world in (1, 2):
        cases = [(name, *layout[1:]) for name in networks for layout in layouts if layout[0] == world]
        plans = []
        for name, precision, zero, keys in cases:
            plans.append(plan_of(world, precision, zero, **{"num_layers": 2, **NETWORKS[name], **keys}))
        if not plans:
            continue
        peaks = run_ranks(world, step_peaks, plans, timeout=1500)
        for number, plan in enumerate(plans):
            device = device_of(plan)
            planned = memory_on(plan, device).needed(on_cpu=device.shared)
            held = max(of_rank[number] for of_rank in peaks)
            if planned != pytest.approx(held, rel=0.05):
                off.append((*cases[number], f"{planned / held - 1:+.1%}"))
    assert off == []


def test_a_recurrent_network_takes_the_planned_memory() -> None:
    check(["mamba2"], LAYOUTS[:1])


@pytest.mark.slow
@pytest.mark.parametrize("network", NETWORKS)
def test_recurrent_networks_take_the_planned_memory(network: str) -> None:
    check([network], LAYOUTS)
