"""Estimated time of a step: what must follow from more work or slower links."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from neox.architecture import training_flops_per_token
from neox.config import load_config
from neox.config.sections.optimizer_table import MuonParams
from neox.devices import GPUS
from neox.plan import resolve
from neox.plan.layout import Workload
from neox.plan.time import StepModel, estimate_step
from neox.plan.time.muon import newton_schulz_work
from neox.plan.time.step import PassTime
from tests.plans import plan_of

CONFIGS = Path(__file__).resolve().parents[4] / "configs"

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
SLOW_NETWORK = replace(GPUS["h100"], network_gbs=1.6)


def llama(**keys: Any) -> Workload:
    """Return a network of Llama 3's 8B in a layout on eight GPUs."""
    return plan_of(8, 128256, **{**LLAMA_8B, **keys}).workload


def test_parameters_and_operations_are_those_of_llama() -> None:
    run = llama()
    head = 128256 * 4096
    assert run.layers.block_matrix_numel + 2 * head == pytest.approx(8.03e9, rel=0.01)
    time = estimate_step(run, GPUS["h100"])
    per_token = 6 * (run.layers.block_matrix_numel + head) + 12 * 32 * 4096 * 8192
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


def test_modules_of_multi_token_prediction_are_frozen_like_blocks() -> None:
    """Reported as Megatron-Bridge#2409 and litgpt#420. Right: two products for each frozen matrix, three for others."""
    modules = {"mtp_num_layers": 1, "checkpoint_activations": False}
    layers = llama(lora={"r": 8}, **modules).layers
    adapters = sum(spec.numel for spec in layers.parameters if spec.trained)
    # Embedding and head are counted once each: the module has a second product with the head, the embedding has none.
    frozen = sum(spec.numel for spec in layers.parameters if len(spec.shape) > 1 and not spec.trained)
    scores = 12 * 33 * 4096 * 8192
    assert training_flops_per_token(layers, 8192) == 4 * frozen + 6 * adapters + scores


def test_operations_and_time_of_latent_attention() -> None:
    """Reported as maxtext PR 1304 and Megatron-Bridge PR 3695.

    Right: arXiv:2505.09343, table 2: 250 GFLOPs a token of DeepSeek-V3 at 4,096 tokens, causal attention counted half.
    """
    config = load_config([CONFIGS / "deepseek" / "v3.yml"]).config.updated({"seq_length": 4096})
    plan = resolve(config.updated({"mtp_num_layers": 0}), 1024, 129280)
    time = estimate_step(plan.workload, GPUS["h100"])
    scores = 3 * 61 * 128 * 2 * (192 + 128) * 4096
    assert time.model_flops / time.tokens - scores / 2 == pytest.approx(250e9, rel=0.01)
    assert plan.layers.block_matrix_numel == pytest.approx(671e9 - 2 * 129280 * 7168, rel=2e-3)
    # The products of a block take longer than at the peak: blocks are recomputed, and every rank reads 256 experts'
    # weights for 128 rows each.
    peak = (time.model_flops - scores * time.tokens) / (1024 * GPUS["h100"].peak_tflops * 1e12)
    assert peak < time.products < 5 * peak


def test_queries_of_a_window_meet_its_keys_only() -> None:
    """Reported as OLMo-core#475 and Megatron-LM#1725. Right: 12 x width x min(window, length) for each such block."""
    whole, windowed = (estimate_step(llama(**keys), GPUS["h100"]) for keys in ({}, {"sliding_window_width": 1024}))
    fewer = 12 * 32 * 4096 * (8192 - 1024)
    assert (whole.model_flops - windowed.model_flops) / whole.tokens == pytest.approx(fewer, rel=1e-6)
    # Pairs that a causal mask leaves: the whole triangle, or a band of it without its first corner.
    pairs = (1024 * 8192 - 1024**2 / 2) / (8192**2 / 2)
    assert windowed.attention == pytest.approx(whole.attention * pairs, rel=0.02)


def test_time_in_which_muon_makes_steps_of_momentum() -> None:
    """Reported as Moonlight#33: Muon takes more time than AdamW. Right: operations that torch counts in its Muon."""
    muon = {"optimizer": {"type": "Muon", "params": {"lr": 0.02}}, "checkpoint_activations": False}
    small = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_kv_heads": 2, "mlp_width": 96}
    run = llama(**muon, **small, seq_length=64)
    shapes = [(64, 64), (32, 64), (32, 64), (64, 64), (96, 64), (96, 64), (64, 96)] * 2
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    with FlopCounterMode(display=False) as counter:
        torch.optim.Muon(parameters).step()
    params = run.config.optimizer.optimizer.params
    assert isinstance(params, MuonParams)
    assert newton_schulz_work(run.layers, params).flops == counter.get_total_flops()

    def update(stage: int, **layout: int) -> float:
        run = llama(**muon, zero_optimization={"stage": stage}).with_layout(**layout)
        return estimate_step(run, GPUS["h100"]).update

    adam = estimate_step(llama(zero_optimization={"stage": 0}, checkpoint_activations=False), GPUS["h100"]).update
    assert update(0) > 5 * adam
    assert update(1) < update(0) / 6  # data ranks divide matrices
    assert update(3) > update(1) * 5  # and each of them, so that all compute all
    assert update(0, tp_size=2, dp_size=4) > 0.9 * update(0)  # tensor ranks compute the same steps


def test_a_copied_reference_computes_each_micro_batch_forward() -> None:
    """Reported as RL#2484 of NVIDIA-NeMo and trl#2569. Right: a forward pass more, a third of forward and backward."""
    pairs = {
        "train_impl": "dpo",
        "pos_train_data_paths": ["chosen"],
        "neg_train_data_paths": ["rejected"],
        "checkpoint_activations": False,
        "no_weight_tying": False,
    }
    stored = estimate_step(llama(**pairs, reference_model="start"), GPUS["h100"])
    copied = estimate_step(llama(**pairs, reference_model="copy"), GPUS["h100"])
    gpu = GPUS["h100"]
    of_attention = stored.attention / (1 + 2.5 * gpu.attention_tflops / gpu.attention_backward_tflops)
    forward = (stored.products + stored.elementwise) / 3 + of_attention  # attention's backward pass takes over twice
    assert stored.reference == 0
    assert copied.seconds - stored.seconds == pytest.approx(forward, rel=0.05)
    run = llama(**pairs, reference_model="copy").with_layout(pp_size=2, dp_size=4)
    assert estimate_step(run, GPUS["h100"]).reference == pytest.approx(copied.reference * 9 / 8 / 2, rel=0.15)


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
        time.reference,
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


def test_the_backward_pass_repeats_what_is_recomputed() -> None:
    """A block, attention without its output projection, scores alone, and the MLP if it is computed in tiles."""

    def recomputed(**layout: object) -> PassTime:
        return StepModel(llama().with_layout(**layout), GPUS["h100"]).recomputed()

    kept = StepModel(llama(), GPUS["h100"])
    assert recomputed() == PassTime()
    assert recomputed(recomputes=True) == kept.forward
    assert recomputed(recomputes=True, no_recompute_blocks=(0,) * 8).products == pytest.approx(
        kept.forward.products * 3 / 4
    )
    scores = recomputed(recomputes=True, recomputed_part="core_attn", attention="fused")
    assert (scores.products, recomputed(recomputes=True, recomputed_part="core_attn")) == (0, PassTime())
    assert scores.attention > kept.forward.attention
    attention = recomputed(recomputes=True, recomputed_part="full_attn")
    projections = 4096 * (4096 + 2 * 1024)
    assert attention.attention == kept.forward.attention
    of_block = projections + 4096**2 + 3 * 4096 * 14336
    assert attention.products / kept.forward.products == pytest.approx(projections / of_block, rel=0.05)
    tiles = recomputed(tile_tokens=1024)
    assert tiles.products / kept.forward.products == pytest.approx(3 * 4096 * 14336 / of_block, rel=0.05)


@pytest.mark.parametrize(
    "slower", [{"compile_layers": False}, {"zero_optimization": {"stage": 1, "overlap_comm": False}}]
)
def test_keys_that_take_longer(slower: dict[str, Any]) -> None:
    fast = estimate_step(llama(), GPUS["h100"])
    slow = estimate_step(llama(**slower), GPUS["h100"])
    assert slow.tokens_per_gpu < fast.tokens_per_gpu


def test_a_slow_network_takes_longer() -> None:
    fast = estimate_step(llama(), GPUS["h100"])
    wider = llama().with_layout(dp_size=16, accumulation_steps=4)
    slow = estimate_step(wider, replace(GPUS["h100"], network_gbs=0.8))
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

    def seconds(run: Workload) -> float:
        return estimate_step(run, SLOW_NETWORK).gradients

    assert seconds(copied) < 0.7 * seconds(shared)
    assert seconds(copied.with_layout(accumulation_steps=1)) < seconds(shared.with_layout(accumulation_steps=1))


def test_quantised_weights_are_gathered_in_half_the_time() -> None:
    whole = llama().with_layout(zero_stage=3, dp_size=64)
    zero = {"stage": 3, "overlap_comm": True, "zero_quantized_weights": True}
    quantised = llama(zero_optimization=zero).with_layout(dp_size=64)
    seconds = [estimate_step(run, SLOW_NETWORK).gradients for run in (whole, quantised)]
    assert seconds[1] < 0.8 * seconds[0]


@pytest.mark.parametrize("kind", ["all_gather", "ulysses"])
def test_context_ranks_exchange_more_over_slower_links(kind: str) -> None:
    divided = llama(context_parallel_kind=kind).with_layout(seq_length=32768, cp_size=4)
    fast = estimate_step(divided, GPUS["h100"])
    slow = estimate_step(divided, replace(GPUS["h100"], link_gbs=33.75))
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
    assert mixture.layers.block_matrix_numel == pytest.approx(
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
