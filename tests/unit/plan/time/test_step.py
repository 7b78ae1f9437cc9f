"""Estimated time of a step, against published runs and what must follow from more work or slower links."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest

from benchmarks.step_time import predict, read_rows
from neox.plan.time import GPUS, NetworkShape, StepSetting, estimate_step

LLAMA_8B = NetworkShape(
    layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, mlp_width=14336, gated=True, vocabulary=128256
)
SETTING = StepSetting(sequence=8192, micro_batch=1, micro_batches=8, dp=8, zero_stage=1)


def test_published_runs() -> None:
    predictions = [predict(row) for row in read_rows()]
    complete = [found.error for found in predictions if found.complete]
    assert len(complete) >= 14
    assert median(complete) <= 0.08
    assert max(found.error for found in predictions) <= 0.20


def test_parameters_and_operations_are_those_of_llama() -> None:
    assert LLAMA_8B.parameters == pytest.approx(8.03e9, rel=0.01)
    time = estimate_step(LLAMA_8B, SETTING, GPUS["h100"])
    per_token = 6 * (LLAMA_8B.parameters - LLAMA_8B.vocabulary * LLAMA_8B.hidden) + 12 * 32 * 4096 * 8192
    assert time.model_flops == pytest.approx(per_token * time.tokens, rel=1e-6)
    assert time.tokens == 8192 * 8 * 8


@pytest.mark.parametrize("gpu", sorted(GPUS))
def test_parts_add_up_and_no_gpu_exceeds_its_peak(gpu: str) -> None:
    time = estimate_step(LLAMA_8B, replace(SETTING, pp=2, dp=4, tp=2), GPUS[gpu])
    parts = (
        time.products,
        time.attention,
        time.elementwise,
        time.tensor,
        time.context,
        time.bubble,
        time.gradients,
        time.update,
    )
    assert time.seconds == pytest.approx(sum(parts))
    assert min(parts) >= 0
    assert 0.05 < time.mfu < 0.8


@pytest.mark.parametrize(
    "slower",
    [
        {"recompute": "full"},
        {"recompute": "core_attn"},
        {"fused": False},
        {"flash": False},
        {"overlaps_gradients": False},
        {"network": 1.0, "dp": 16, "micro_batches": 4},
    ],
)
def test_what_takes_longer(slower: dict[str, object]) -> None:
    fast = estimate_step(LLAMA_8B, SETTING, GPUS["h100"])
    slow = estimate_step(LLAMA_8B, replace(SETTING, **slower), GPUS["h100"])  # type: ignore[arg-type]
    assert slow.tokens_per_gpu < fast.tokens_per_gpu


def test_unbalanced_context_ranks_wait_for_the_last() -> None:
    balanced = replace(SETTING, sequence=131072, cp=4, dp=2)
    fast = estimate_step(LLAMA_8B, balanced, GPUS["h100"])
    slow = estimate_step(LLAMA_8B, replace(balanced, balanced_context=False), GPUS["h100"])
    assert slow.attention == pytest.approx(fast.attention * 7 / 4, rel=0.01)
