"""What ranks that divide experts exchange: bytes, times and rows of a plan."""

from __future__ import annotations

from typing import Any

import pytest

from neox.devices import GPUS
from neox.plan import RunPlan, config_from_files, format_plan, plan_as_dict, resolve
from neox.plan.report.run_totals import run_totals
from neox.plan.time import estimate_step
from neox.plan.time.expert_traffic import expert_traffic
from tests.plans import plan_of
from tests.unit.plan.shipped import CONFIGS

DEEPSEEK_V3: dict[str, Any] = {  # with plain attention
    "num_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "seq_length": 4096,
    "max_position_embeddings": 4096,
    "pos_emb": "rotary",
    "rotary_pct": 1,
    "norm": "rmsnorm",
    "activation": "swiglu",
    "mlp_width": 18432,
    "use_bias_in_mlp": False,
    "use_bias_in_attn_linear": False,
    "no_weight_tying": True,
    "moe_num_experts": 256,
    "moe_top_k": 8,
    "moe_ffn_hidden_size": 2048,
    "moe_shared_expert_intermediate_size": 2048,
    "moe_first_k_dense": 3,
    "moe_router_type": "sigmoid",
    "moe_norm_topk_prob": True,
    "moe_router_enable_expert_bias": True,
    "moe_router_num_groups": 8,
    "moe_router_group_topk": 4,
    "moe_router_topk_scaling_factor": 2.5,
    "expert_model_parallel_size": 64,
    "pipe_parallel_size": 16,
    "train_batch_size": 4096,
    "train_micro_batch_size_per_gpu": 1,
    "precision": "bf16",
    "zero_optimization": {"stage": 1},
    "checkpoint_activations": True,
    "gpu_type": "h100",
    "train_iters": 1000,
}


def deepseek() -> RunPlan:
    return plan_of(2048, 129280, **DEEPSEEK_V3)


def mixtral(*overrides: str) -> RunPlan:
    return resolve(config_from_files(["moe/mixtral-8x7B.yml"], conf_dir=CONFIGS, overrides=overrides), 64, 32000)


def test_bytes_and_rows_of_256_experts_on_2048_ranks():
    plan = deepseek()
    traffic = expert_traffic(plan)
    assert traffic is not None
    blocks = 4  # of the fullest stage
    assert traffic.exchanges == 2 * 3 * blocks * 32  # forward, recomputed and backward, of 32 micro batches
    assert traffic.sent_bytes == traffic.exchanges * 4096 * 8 * 7168 * 2 * 63 // 64
    assert traffic.rows == 4096 * 8
    assert traffic.most_rows == 64 * 4096 * 4  # a rank holds 4 of a token's 8 experts
    (held,) = {stage.parameters for stage in plan.stages[2:3]}
    expected = 4 * (256 + 1) * 3 * 7168 * 2048
    assert held == pytest.approx(expected, rel=0.02)


def test_mixtral_on_64_ranks_resolves_and_shows_its_exchanges():
    plan = mixtral("expert_model_parallel_size=8")
    found = plan_as_dict(plan)
    assert found["grid"]["ep"] == 8
    assert found["expert_traffic"]["exchanges"] == 2 * 3 * 4 * 4
    assert found["expert_traffic"]["rows"] == 2 * 8192
    text = format_plan(plan)
    assert "96 all-to-alls" in text
    assert "46,702,792,704 parameters (12,879,925,248 active)" in text


def test_experts_that_every_rank_holds_exchange_nothing():
    plan = mixtral()
    assert expert_traffic(plan) is None
    estimate = run_totals(plan).estimate
    assert estimate is not None
    assert estimate.experts == 0


MIXTURE: dict[str, Any] = {
    "num_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_kv_heads": 8,
    "activation": "swiglu",
    "use_bias_in_mlp": False,
    "use_bias_in_attn_linear": False,
    "attention_config": [[["flash"], "all"]],
    "seq_length": 4096,
    "max_position_embeddings": 4096,
    "pos_emb": "rotary",
    "moe_num_experts": 8,
    "moe_top_k": 2,
    "moe_ffn_hidden_size": 14336,
    "moe_router_type": "topk",
    "precision": "bf16",
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 1, "overlap_comm": True},
}


def test_the_time_of_exchanges_follows_from_links():
    gpu = GPUS["h100"]
    mixture = plan_of(16, 32000, **MIXTURE).workload
    within = estimate_step(mixture.with_layout(ep_size=8), gpu)
    size = 2 * 4096 * 2 * 4096  # bytes of a block's rows
    transfer = size * 7 / 8 / (gpu.link_gbs * 1e9)
    assert within.experts == pytest.approx(4 * 32 * (transfer + gpu.collective_seconds), rel=1e-6)
    between = estimate_step(mixture.with_layout(ep_size=16), gpu)
    slow = size * 8 / 16 / (gpu.network_gbs * 1e9)
    assert between.experts == pytest.approx(4 * 32 * (slow + gpu.collective_seconds), rel=1e-6)
    recomputed = estimate_step(mixture.with_layout(ep_size=8, recomputes=True), gpu)
    assert recomputed.experts == pytest.approx(1.5 * within.experts)


def test_divided_experts_have_less_to_reduce_and_without_zero_less_to_update():
    gpu = GPUS["h100"]
    mixture = plan_of(16, 32000, **MIXTURE).workload
    whole = estimate_step(mixture, gpu)
    divided = estimate_step(mixture.with_layout(ep_size=16), gpu)
    assert divided.gradients < whole.gradients
    assert divided.update == whole.update  # ZeRO divides states over all data ranks either way
    unsharded = mixture.with_layout(zero_stage=0)
    assert estimate_step(unsharded.with_layout(ep_size=16), gpu).update < estimate_step(unsharded, gpu).update
