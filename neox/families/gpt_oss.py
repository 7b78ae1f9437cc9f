"""gpt-oss (`GptOssForCausalLM`): experts with biases, attention sinks, and sliding windows in every other block.

Source: transformers, models/gpt_oss; arXiv:2508.10925. The published weights of experts are MXFP4, and are
read as bf16, as transformers reads them (`Mxfp4Config(dequantize=True)`).
"""

from __future__ import annotations

from types import MappingProxyType

from neox.families.config_entries import ATTENTION_BIASES_EQUAL, Fixed, Switch
from neox.families.expert_entries import (
    SOFTMAX_EXPERTS,
    ExpertSize,
    SeveralExperts,
    with_experts_instead_of_mlps,
)
from neox.families.family import Family, TensorSource
from neox.families.llama_like import BASE_PREFIX, BUFFERS, NETWORK, llama_entries, llama_tensors
from neox.families.shared_entries import Activation, Rotary, WindowPattern, ending_entries

_BLOCK = "model.layers.{i}."
_STACKS = MappingProxyType({"weight": "", "bias": "_bias"})
_TENSORS = llama_tensors()
_YARN = MappingProxyType(
    {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    }
)

GPT_OSS = Family(
    model_type="gpt_oss",
    class_name="GptOssForCausalLM",
    score_class="GptOssForSequenceClassification",
    title="gpt-oss",
    fixed_fields={
        **NETWORK,
        **SOFTMAX_EXPERTS,
        "router_normalizes": True,
        "router_logit_bias": True,
        "expert_bias": True,
        "attention_sinks": True,
    },
    config=(
        *with_experts_instead_of_mlps(
            llama_entries(
                max_positions=131072,
                norm_epsilon=1e-5,
                num_kv_heads=8,
                head_dim=64,
                rotary=Rotary(default_base=150000.0, default_scaling=_YARN),
            )
        ),
        Activation("hidden_act", {"clamped_swiglu": "silu"}, "silu"),
        Fixed("swiglu_alpha", 1.702),
        Fixed("swiglu_limit", 7.0),
        WindowPattern(every=2, default_window=128),
        Switch("attention_bias", "qkv_bias", default=True),
        ATTENTION_BIASES_EQUAL,
        SeveralExperts("num_local_experts", "num_experts", 128),
        ExpertSize("num_experts_per_tok", "experts_per_token", 4),
        *ending_entries(),
    ),
    tensors={
        **_TENSORS,
        "block": {
            **_TENSORS["block"],
            "attention": TensorSource((f"{_BLOCK}self_attn",)),
            "mlp.router": TensorSource((f"{_BLOCK}mlp.router",)),
            "mlp.experts.dense_h_to_4h": TensorSource(
                (f"{_BLOCK}mlp.experts.gate_up_proj",), layout="alternating_experts", endings=_STACKS
            ),
            "mlp.experts.dense_4h_to_h": TensorSource(
                (f"{_BLOCK}mlp.experts.down_proj",), layout="stacked_experts", endings=_STACKS
            ),
        },
    },
    base_prefix=BASE_PREFIX,
    buffers=BUFFERS,
)
