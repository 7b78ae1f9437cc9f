"""Estimated time of a step: what must follow from more work or slower links."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from neox.architecture import training_flops_per_token
from neox.plan.layout import LaidOutRun
from neox.plan.time import GPUS, TrainingSystem, estimate_step
from neox.plan.time.system import held_parameters
from tests.plans import plan_of

LLAMA_8B: dict[str, Any] = {
    "num_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_kv_heads": 8,
    "mlp_width": 14336,
    "activation": "swiglu",
    "norm": "rmsnorm",
    "use_bias_in_mlp": False,
    "use_bias_in_attn_linear": False,
    "no_weight_tying": True,
    "pos_emb": "rotary",
    "attention_config": [[["flash"], "all"]],
    "seq_length": 8192,
    "max_position_embeddings": 8192,
    "make_vocab_size_divisible_by": 1,
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 8,
    "precision": "bf16",
    "zero_optimization": {"stage": 1, "overlap_comm": True},
}
IN_RING = TrainingSystem(in_ring=True)
SLOW_NETWORK = TrainingSystem(network=2.0)


def llama(**keys: Any) -> LaidOutRun:
    """Return a network of Llama 3's 8B in a layout on eight GPUs."""
    return plan_of(8, 128256, **{**LLAMA_8B, **keys}).laid_out


def test_parameters_and_operations_are_those_of_llama() -> None:
    run = llama()
    head = 128256 * 4096
    assert held_parameters(run) + 2 * head == pytest.approx(8.03e9, rel=0.01)
    time = estimate_step(run, GPUS["h100"])
    per_token = 6 * (held_parameters(run) + head) + 12 * 32 * 4096 * 8192
    assert time.model_flops == pytest.approx(per_token * time.tokens, rel=1e-6)
    assert time.tokens == 8192 * 8 * 8


def test_frozen_weights_take_part_once_in_the_backward_pass() -> None:
    every = llama(zero_optimization={"stage": 1}, checkpoint_activations=False)
    adapted = llama(zero_optimization={"stage": 1}, checkpoint_activations=False, lora={"r": 8})
    whole, lora = (estimate_step(run, GPUS["h100"]) for run in (every, adapted))
    assert lora.products == pytest.approx(whole.products * 2 / 3, rel=0.01)
    counted = training_flops_per_token(adapted.layers, 8192) * lora.tokens
    assert lora.model_flops == pytest.approx(counted, rel=0.005)  # adapters' own products are left out
    assert lora.update < whole.update / 100
    assert lora.gradients < whole.gradients / 5
    assert lora.attention == whole.attention


@pytest.mark.parametrize("gpu", sorted(GPUS))
def test_parts_add_up_and_no_gpu_exceeds_its_peak(gpu: str) -> None:
    time = estimate_step(llama().with_layout(pp_size=2, dp_size=4, tp_size=2), GPUS[gpu])
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
    "slower", [{"recomputes": True}, {"recomputes": True, "recomputed_part": "core_attn"}, {"attention": "fused"}]
)
def test_layouts_that_take_longer(slower: dict[str, object]) -> None:
    fast = estimate_step(llama(), GPUS["h100"])
    slow = estimate_step(llama().with_layout(**slower), GPUS["h100"])
    assert slow.tokens_per_gpu < fast.tokens_per_gpu


@pytest.mark.parametrize("slower", [{"fused": False}, {"overlaps_gradients": False}])
def test_systems_that_take_longer(slower: dict[str, Any]) -> None:
    fast = estimate_step(llama(), GPUS["h100"])
    slow = estimate_step(llama(), GPUS["h100"], TrainingSystem(**slower))
    assert slow.tokens_per_gpu < fast.tokens_per_gpu


def test_a_slow_network_takes_longer() -> None:
    fast = estimate_step(llama(), GPUS["h100"])
    wider = llama().with_layout(dp_size=16, accumulation_steps=4)
    slow = estimate_step(wider, GPUS["h100"], TrainingSystem(network=1.0))
    assert slow.tokens_per_gpu < fast.tokens_per_gpu


def test_gradients_are_reduced_during_the_backward_pass_unless_that_is_switched_off() -> None:
    """Of bf16 with ZeRO 1 the engine reduces layers by itself; of fp16 only if DeepSpeed is asked to."""
    for precision, hides in (({"precision": "bf16"}, True), ({"precision": None, "fp16": {"enabled": True}}, False)):
        seconds = []
        for overlap in (None, True, False):
            keys = {"stage": 1, "overlap_comm": overlap}
            seconds.append(estimate_step(llama(**precision, zero_optimization=keys), GPUS["a100-80"]).gradients)
        default, on, off = seconds
        assert on < off
        assert default == (on if hides else off)


def test_copies_in_hosts_replace_gathers_between_hosts() -> None:
    shared = llama().with_layout(zero_stage=3, dp_size=64)
    copied = shared.with_layout(hpz_size=8)

    def seconds(run: LaidOutRun) -> float:
        return estimate_step(run, GPUS["h100"], SLOW_NETWORK).gradients

    assert seconds(copied) < 0.7 * seconds(shared)
    assert seconds(copied.with_layout(accumulation_steps=1)) < seconds(shared.with_layout(accumulation_steps=1))


def test_quantised_weights_are_gathered_in_half_the_time() -> None:
    whole = llama().with_layout(zero_stage=3, dp_size=64)
    zero = {"stage": 3, "overlap_comm": True, "zero_quantized_weights": True}
    quantised = llama(zero_optimization=zero).with_layout(dp_size=64)
    seconds = [estimate_step(run, GPUS["h100"], SLOW_NETWORK).gradients for run in (whole, quantised)]
    assert seconds[1] < 0.8 * seconds[0]


@pytest.mark.parametrize("kind", ["all_gather", "ulysses"])
def test_context_ranks_exchange_more_over_slower_links(kind: str) -> None:
    divided = llama(context_parallel_kind=kind).with_layout(seq_length=32768, cp_size=4)
    fast = estimate_step(divided, GPUS["h100"])
    slow = estimate_step(divided, replace(GPUS["h100"], link=45.0))
    assert fast.context > 0
    assert slow.context > 5 * fast.context
    assert slow.attention == fast.attention


def test_few_heads_of_keys_favour_gathered_keys() -> None:
    def seconds(kv_heads: int, kind: str) -> float:
        run = llama(num_kv_heads=kv_heads, context_parallel_kind=kind)
        return estimate_step(run.with_layout(seq_length=32768, cp_size=2), GPUS["h100"]).context

    assert seconds(1, "all_gather") < seconds(1, "ulysses")
    assert seconds(32, "all_gather") > 0.5 * seconds(32, "ulysses")


def test_divided_experts_exchange_tokens_and_hold_fewer_parameters() -> None:
    experts = {"moe_num_experts": 8, "moe_top_k": 2, "moe_ffn_hidden_size": 14336, "moe_router_type": "topk"}
    mixture = llama(**experts).with_layout(zero_stage=0)
    active = mixture.layers.active_numel - 2 * 128256 * 4096
    assert held_parameters(mixture) == pytest.approx(
        active + mixture.layers.numel - mixture.layers.active_numel, rel=1e-3
    )
    whole = estimate_step(mixture, GPUS["h100"])
    divided = estimate_step(mixture.with_layout(ep_size=8), GPUS["h100"])
    assert whole.experts == 0 < divided.experts
    assert divided.update < whole.update
    assert divided.gradients <= whole.gradients


def test_states_and_weights_in_main_memory_take_time() -> None:
    run = llama().with_layout(zero_stage=3)
    on_gpu = estimate_step(run, GPUS["h100"])
    states = estimate_step(run.with_layout(offloads_states=True), GPUS["h100"])
    weights = estimate_step(run.with_layout(offloads_states=True, offloads_weights=True), GPUS["h100"])
    assert states.update > 10 * on_gpu.update
    assert states.gradients == on_gpu.gradients
    assert weights.gradients > states.gradients


def test_unbalanced_context_ranks_wait_for_the_last() -> None:
    run = llama().with_layout(seq_length=131072, cp_size=4)
    fast = estimate_step(run, GPUS["h100"], IN_RING)
    slow = estimate_step(run, GPUS["h100"], replace(IN_RING, balanced_context=False))
    assert slow.attention == pytest.approx(fast.attention * 7 / 4, rel=0.01)


@pytest.mark.parametrize(
    ("gpu", "measured"),
    [("mi300x", {2: 47.7, 8: 312.9}), ("ascend910b", {2: 18.0, 4: 45.0, 8: 126.0})],
)
def test_pairs_of_gpus_that_are_linked_one_by_one(gpu: str, measured: dict[int, float]) -> None:
    """Bandwidth of all-reduces on the links, in GB/s.

    stas00/ml-engineering, network/README.md (4 GiB); gameofdimension/limulidae (18, 30 and 72 GB/s of payload).
    """
    for ranks, bandwidth in measured.items():
        assert GPUS[gpu].link_between(ranks) == pytest.approx(bandwidth, rel=0.17)
    assert GPUS["h100"].link_between(2) == GPUS["h100"].link_between(8)


def test_a_parallel_residual_is_summed_over_tensor_ranks_once() -> None:
    layout = {"tp_size": 4, "dp_size": 2}
    twice = estimate_step(llama().with_layout(**layout), GPUS["h100"])
    once = estimate_step(llama(gpt_j_residual=True).with_layout(**layout), GPUS["h100"])
    assert once.tensor == pytest.approx(twice.tensor * 3 / 4)  # the gradients of both inputs are still summed
