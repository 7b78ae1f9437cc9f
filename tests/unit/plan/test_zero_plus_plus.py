"""Keys of ZeRO++: what they need, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.plans import SIZES, problems_of

CPU = {"device": "cpu"}
OFFLOADED = {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU}


@pytest.mark.parametrize(
    ("key", "other", "zero", "keys"),
    [
        ("zero_hpz_partition_size", "zero_optimization.stage", {"stage": 2, "zero_hpz_partition_size": 2}, {}),
        (
            "zero_hpz_partition_size",
            "zero_optimization.offload_param.device",
            {**OFFLOADED, "zero_hpz_partition_size": 2},
            {},
        ),
        ("zero_quantized_weights", "zero_optimization.stage", {"stage": 2, "zero_quantized_weights": True}, {}),
        (
            "zero_quantized_gradients",
            "model_parallel_size",
            {"stage": 3, "zero_quantized_gradients": True},
            {"model_parallel_size": 2},
        ),
        ("mics_shard_size", None, {"stage": 3, "mics_shard_size": 8}, {}),
        (
            "zero_quantized_nontrainable_weights",
            None,
            {"stage": 3, "zero_quantized_nontrainable_weights": True},
            {"lora": {"r": 4, "alpha": 8, "target": ["query_key_value"]}},
        ),
    ],
)
def test_what_a_key_needs(key: str, other: str | None, zero: dict[str, Any], keys: dict[str, Any]) -> None:
    (problem,) = problems_of(2, **{**SIZES, **keys, "zero_optimization": zero})
    assert problem.keys[0] == f"zero_optimization.{key}"
    assert other is None or other in problem.keys
