"""Settings that a kind of device does not support: the launcher and the ranks refuse them by one function."""

from __future__ import annotations

from typing import Any

import pytest

from neox.devices import DeviceFamily
from neox.plan.devices.unsupported import unsupported_by_device
from tests.plans import small_plan

FLASH: dict[str, Any] = {"attention_config": [[["flash"], "all"]], "precision": "bf16"}
BACKEND = "attention_backend"
FUSED = "scaled_upper_triang_masked_softmax_fusion"
QUANTIZED = {"zero_optimization": {"stage": 3, "zero_quantized_weights": True, "zero_quantized_gradients": False}}


@pytest.mark.parametrize(
    ("family", "keys", "refused"),
    [
        ("cpu", {**FLASH, BACKEND: "math"}, []),
        ("cpu", {**FLASH, BACKEND: "flash", "precision": "fp32"}, []),
        ("cpu", {**FLASH, BACKEND: "cudnn"}, [(BACKEND,)]),
        ("cpu", {**FLASH, BACKEND: "flex"}, [(BACKEND,)]),
        ("cpu", {**FLASH, BACKEND: "memory_efficient"}, [(BACKEND,)]),
        ("rocm", {**FLASH, BACKEND: "cudnn"}, [(BACKEND,)]),
        ("npu", {**FLASH, BACKEND: "flash"}, [(BACKEND,)]),
        ("cuda", {**FLASH, BACKEND: "cudnn"}, []),
        ("cuda", {**FLASH, BACKEND: "cudnn", "precision": "fp32"}, [(BACKEND, "precision")]),
        ("cuda", {**FLASH, BACKEND: "flex"}, [(BACKEND,)]),
        ("cuda", {**FLASH, BACKEND: "flex", "head_dim": 16}, []),
        ("cuda", {FUSED: True, "seq_length": 2**16}, []),
        ("cuda", {FUSED: True, "seq_length": 2**17}, [(FUSED, "seq_length")]),
        ("cpu", {FUSED: True, "seq_length": 2**17}, []),
        ("cpu", {"fp8": "tensorwise", "precision": "bf16"}, []),
        ("rocm", {"fp8": "tensorwise", "precision": "bf16"}, [("fp8",)]),
        ("cpu", QUANTIZED, [("zero_optimization.zero_quantized_weights",)]),
        ("cuda", QUANTIZED, []),
    ],
)
def test_what_a_device_does_not_support_is_refused(
    family: DeviceFamily, keys: dict[str, Any], refused: list[tuple[str, ...]]
) -> None:
    found = unsupported_by_device(small_plan(max_position_embeddings=2**17, **keys), family)
    assert [problem.keys for problem in found] == refused
