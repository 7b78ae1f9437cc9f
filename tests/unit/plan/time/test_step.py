"""Estimated time of a step: what must follow from more work or slower links."""

from __future__ import annotations

from dataclasses import replace

import pytest

from neox.plan.time import GPUS, NetworkShape, StepSetting, estimate_step

LLAMA_8B = NetworkShape(
    layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, mlp_width=14336, gated=True, vocabulary=128256
)
SETTING = StepSetting(sequence=8192, micro_batch=1, micro_batches=8, dp=8, zero_stage=1)


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
        time.experts,
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


def test_copies_in_hosts_replace_gathers_between_hosts() -> None:
    shared = replace(SETTING, zero_stage=3, dp=64, network=2.0)
    copied = replace(shared, copies=8)
    one_micro_batch = estimate_step(LLAMA_8B, replace(copied, micro_batches=1), GPUS["h100"]).gradients
    without = estimate_step(LLAMA_8B, shared, GPUS["h100"]).gradients
    assert estimate_step(LLAMA_8B, copied, GPUS["h100"]).gradients < 0.7 * without
    assert one_micro_batch < estimate_step(LLAMA_8B, replace(shared, micro_batches=1), GPUS["h100"]).gradients


def test_quantised_weights_are_gathered_in_half_the_time() -> None:
    shared = replace(SETTING, zero_stage=3, dp=64, network=2.0)
    whole = estimate_step(LLAMA_8B, shared, GPUS["h100"]).gradients
    assert estimate_step(LLAMA_8B, replace(shared, weight_bytes=1), GPUS["h100"]).gradients < 0.8 * whole


@pytest.mark.parametrize("kind", ["all_gather", "ulysses"])
def test_context_ranks_exchange_more_over_slower_links(kind: str) -> None:
    divided = replace(SETTING, sequence=32768, cp=4, dp=2, context=kind)
    fast = estimate_step(LLAMA_8B, divided, GPUS["h100"])
    slow = estimate_step(LLAMA_8B, divided, replace(GPUS["h100"], link=45.0))
    assert fast.context > 0
    assert slow.context > 5 * fast.context
    assert slow.attention == fast.attention


def test_few_heads_of_keys_favour_gathered_keys() -> None:
    divided = replace(SETTING, sequence=32768, cp=2, dp=4)

    def seconds(kv_heads: int, kind: str) -> float:
        shape = replace(LLAMA_8B, kv_heads=kv_heads)
        return estimate_step(shape, replace(divided, context=kind), GPUS["h100"]).context  # type: ignore[arg-type]

    assert seconds(1, "all_gather") < seconds(1, "ulysses")
    assert seconds(32, "all_gather") > 0.5 * seconds(32, "ulysses")


def test_divided_experts_exchange_tokens_and_hold_fewer_parameters() -> None:
    experts = 8 * 3 * 4096 * 14336 * 32
    mixture = replace(
        LLAMA_8B,
        mlp_width=2 * 14336,
        idle_parameters=experts * 6 // 8,
        expert_parameters=experts,
        experts_per_token=2.0,
    )
    undivided_states = replace(SETTING, zero_stage=0)
    whole = estimate_step(mixture, undivided_states, GPUS["h100"])
    divided = estimate_step(mixture, replace(undivided_states, ep=8), GPUS["h100"])
    assert whole.experts == 0 < divided.experts
    assert divided.update < whole.update
    assert divided.gradients <= whole.gradients


def test_states_and_weights_in_main_memory_take_time() -> None:
    on_gpu = estimate_step(LLAMA_8B, replace(SETTING, zero_stage=3), GPUS["h100"])
    states = estimate_step(LLAMA_8B, replace(SETTING, zero_stage=3, host_states=True), GPUS["h100"])
    weights = estimate_step(LLAMA_8B, replace(SETTING, zero_stage=3, host_states=True, host_weights=True), GPUS["h100"])
    assert states.update > 10 * on_gpu.update
    assert states.gradients == on_gpu.gradients
    assert weights.gradients > states.gradients


def test_unbalanced_context_ranks_wait_for_the_last() -> None:
    balanced = replace(SETTING, sequence=131072, cp=4, dp=2)
    fast = estimate_step(LLAMA_8B, balanced, GPUS["h100"])
    slow = estimate_step(LLAMA_8B, replace(balanced, balanced_context=False), GPUS["h100"])
    assert slow.attention == pytest.approx(fast.attention * 7 / 4, rel=0.01)
