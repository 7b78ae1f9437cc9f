"""What does not work with experts that data ranks divide."""

from __future__ import annotations

from typing import Any

import pytest

from tests.plans import SIZES, problem_keys

DIVIDED: dict[str, Any] = {"moe_num_experts": 8, "moe_router_type": "topk", "expert_model_parallel_size": 2}


@pytest.mark.parametrize(
    ("other", "keys"),
    [
        ("optimizer.type", {"optimizer": {"type": "SM3"}}),
        ("zero_optimization.reduce_scatter", {"zero_optimization": {"stage": 1, "reduce_scatter": False}}),
        ("zero_optimization.contiguous_gradients", {"zero_optimization": {"stage": 2, "contiguous_gradients": False}}),
        ("zero_optimization.contiguous_gradients", {"zero_optimization": {"stage": 1, "contiguous_gradients": False}}),
        (
            "zero_optimization.zero_hpz_partition_size",
            {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}},
        ),
    ],
)
def test_what_deepspeed_or_checkpoints_lack_is_refused(other: str, keys: dict[str, Any]) -> None:
    (named,) = problem_keys(8, **{**SIZES, **DIVIDED, **keys})
    assert named[0] == "expert_model_parallel_size"
    assert other in named


def test_the_wrapper_of_bf16_needs_no_contiguous_gradients() -> None:
    zero = {"stage": 1, "contiguous_gradients": False}
    assert not problem_keys(8, **{**SIZES, **DIVIDED, "precision": "bf16", "zero_optimization": zero})
