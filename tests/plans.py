"""Small configurations and run plans for tests."""

from __future__ import annotations

from typing import Any

from neox.architecture import BlockKind
from neox.config import NeoXConfig
from neox.errors import ConfigError
from neox.plan import RunPlan, resolve
from neox.plan.network.attention_config import asked_kinds
from neox.problems import Problem

# The fewest keys that resolve; everything else has its default.
SIZES: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 32,
    "pos_emb": "rotary",
    "rotary_pct": 0.25,
    "train_iters": 10,
    "train_micro_batch_size_per_gpu": 2,
}

# Two layers without dropout and tied weights, which are quick to build and to compare.
SMALL: dict[str, Any] = {
    **SIZES,
    "num_layers": 2,
    "hidden_size": 32,
    "seq_length": 16,
    "max_position_embeddings": 16,
    "rotary_pct": 0.5,
    "no_weight_tying": True,
    "output_layer_parallelism": "column",
    "make_vocab_size_divisible_by": 32,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "lr_decay_iters": 10,
    "optimizer": {"type": "Adam", "params": {"lr": 0.001}},
}

_NO_BIASES: dict[str, Any] = {"use_bias_in_attn_linear": False, "use_bias_in_mlp": False}

# Networks that tests of every network's properties build: keys beside `SMALL`.
NETWORKS: dict[str, dict[str, Any]] = {
    "rotary": {},
    "learned": {"pos_emb": "learned", "opt_pos_emb_offset": 2, "max_position_embeddings": 18},
    "sinusoidal": {"pos_emb": "sinusoidal", "norm": "scalenorm"},
    "rpe": {"pos_emb": "rpe", "rpe_num_buckets": 8, "rpe_max_distance": 12, "norm": "rmsnorm_v2.0"},
    "alibi": {"pos_emb": "alibi", "norm": "rmsnorm", "gpt_j_residual": True},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}},
    "gemma": {
        "norm": "rmsnorm_1p",
        "norm_placement": "both",
        "qk_norm": "head",
        "activation": "geglu_tanh",
        "mlp_width": 48,
        "attention_config": ["sliding_window", "global"],
        "sliding_window_width": 5,
        "rotary_emb_base_local": 100,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        "embedding_multiplier": 4.0,
        "attention_multiplier": 0.3,
        "attention_softcap": 2.0,
        "logit_softcap": 3.0,
    },
    "sinks": {
        "norm": "layernorm_no_bias",
        "gpt_j_residual": True,
        "gpt_j_tied": True,
        "no_rotary_layers": [1],
        "residual_multiplier": 0.3,
        "logit_multiplier": 0.5,
        "attention_sinks": True,
    },
    "gated heads": {
        "norm": "rmsnorm_1p",
        "qk_norm": "head",
        "head_dim": 12,
        "num_kv_heads": 2,
        "attention_output_gate": True,
    },
    "gated equal heads": {"attention_output_gate": True, "gpt_j_residual": True},
    "latent": {
        "norm": "rmsnorm",
        "attention_config": ["latent", "latent"],
        "kv_lora_rank": 12,
        "q_lora_rank": 10,
        "head_dim": 10,
        "rotary_pct": 0.4,
        "v_head_dim": 6,
        "use_bias_in_qkv": False,
    },
    "latent and global": {
        "norm": "rmsnorm",
        "attention_config": ["latent", "global"],
        "kv_lora_rank": 12,
        "use_bias_in_attn_linear": False,
    },
    "none": {"pos_emb": "none", "norm": "non_parametric_layernorm"},
    "local": {"attention_config": ["local", "global"], "sparsity_config": {"block": 2, "num_local_blocks": 2}},
    "sparse_fixed": {
        "attention_config": ["sparse_fixed", "sparse_fixed"],
        "sparsity_config": {
            "block": 2,
            "num_local_blocks": 2,
            "different_layout_per_head": True,
            "num_different_global_patterns": 2,
        },
    },
    "bigbird": {
        "attention_config": ["bigbird", "sparse_variable"],
        "sparsity_config": {"block": 2, "num_random_blocks": 1, "different_layout_per_head": True},
    },
    "bslongformer": {"attention_config": ["bslongformer", "global"], "sparsity_config": {"block": 2}},
    "gmlp": {"attention_config": ["gmlp", "global"]},
    "amlp": {"attention_config": ["global", "amlp"], "gmlp_attn_dim": 8, "norm": "rmsnorm"},
    "mamba": {
        "attention_config": ["mamba", "global"],
        "norm": "rmsnorm",
        "mamba_width": 48,
        "mamba_state_dim": 4,
        "mamba_use_bias_in_linears": True,
    },
    "gated_delta": {
        "attention_config": ["gated_delta", "global"],
        "norm": "rmsnorm_1p",
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 6,
        "linear_value_head_dim": 8,
        "attention_output_gate": True,
    },
    "olmo hybrid": {
        "attention_config": ["global", "gated_delta"],
        "norm": "rmsnorm",
        "norm_placement": "output",
        "qk_norm": "full",
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 6,
        "linear_conv_kernel_dim": 3,
        "linear_allow_neg_eigval": True,
        "linear_norm_placement": "input",
        "activation": "swiglu",
        "mlp_width": 44,
        **_NO_BIASES,
    },
    "mamba2": {
        "attention_config": ["mamba2", "global"],
        "norm": "rmsnorm",
        "mamba_head_dim": 8,
        "mamba_state_dim": 6,
        "mamba_num_groups": 4,
    },
    "mamba2_mlp": {
        "attention_config": ["sliding_window", "mamba2_mlp"],
        "sliding_window_width": 5,
        "mamba_num_heads": 4,
        "mamba_head_dim": 6,
        "mamba_state_dim": 8,
        "mamba_conv_width": 3,
        "mamba_use_bias_in_conv": False,
        "mamba_use_bias_in_linears": True,
        "gpt_j_residual": True,
    },
    "rwkv": {"attention_config": ["rwkv", "global"], "dim_att": 48, "head_size": 6, "ffn_dim": 40},
    "soft_prompt": {"soft_prompt_tuning": {"enabled": True, "num_tokens": 3}},
    "mup": {"use_mup": True, "mup_base_hidden_size": 16, "mup_output_temp": 0.5, "mup_embedding_mult": 2.0},
    "gptj": {
        "gpt_j_residual": True,
        "gpt_j_tied": True,
        "use_bias_in_attn_linear": False,
        "use_bias_in_lm_head": True,
        "activation": "gelu_tanh",
    },
    "parallel without biases": {"gpt_j_residual": True, **_NO_BIASES, "activation": "relu"},
    "llama": {"norm": "rmsnorm", "activation": "swiglu", "num_kv_heads": 2, "mlp_width": 44, **_NO_BIASES},
    "mistral": {
        "activation": "swiglu",
        "mlp_width": 20,
        "num_kv_heads": 2,
        "attention_config": ["flash", "flash"],
        "sliding_window_width": 5,
        **_NO_BIASES,
    },
    "qwen2": {
        "activation": "swiglu",
        "intermediate_size": 100,
        "mlp_multiple_of": 4,
        **_NO_BIASES,
        "use_bias_in_qkv": True,
        "attention_config": ["flash", "global"],
    },
    "qwen3": {"norm": "rmsnorm", "qk_norm": "head", "head_dim": 12, "num_kv_heads": 2, **_NO_BIASES},
    "olmo2": {
        "norm": "rmsnorm",
        "qk_norm": "full",
        "norm_placement": "output",
        "activation": "reglu",
        "mlp_width": 24,
        **_NO_BIASES,
    },
    "normalised heads": {
        "use_qk_layernorm": True,
        "num_kv_heads": 2,
        "activation": "geglu",
        "mlp_width": 12,
        "pos_emb": "none",
    },
    "rms-normalised heads": {"use_qk_layernorm": True, "norm": "rmsnorm", "activation": "mish", "gpt_j_residual": True},
    "windows": {
        "attention_config": ["sliding_window", "global"],
        "sliding_window_width": 3,
        "activation": "glu",
        "mlp_width": 8,
        "head_dim": 6,
        "rotary_pct": 1.0,
    },
    "experts": {
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "moe_router_type": "topk",
        "moe_ffn_hidden_size": 20,
        "activation": "swiglu",
        "moe_aux_loss_coeff": 0.1,
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_z_loss_coeff": 0.01,
        **_NO_BIASES,
    },
    "shared expert": {
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "moe_layer_freq": [0, 1],
        "moe_router_type": "sigmoid",
        "moe_norm_topk_prob": True,
        "moe_router_num_groups": 2,
        "moe_router_group_topk": 1,
        "moe_router_topk_scaling_factor": 1.5,
        "moe_shared_expert_intermediate_size": 12,
        "moe_shared_expert_gate": True,
        "gpt_j_residual": True,
    },
}


def block_kinds_of(keys: dict[str, Any]) -> list[BlockKind]:
    """Return the kinds of blocks of a network of `NETWORKS`."""
    return list(asked_kinds(NeoXConfig.from_flat({**SMALL, **keys})).values())


# Those with experts; those whose blocks run any kernel of attention, that generate with a cache, whose steps are
# recorded as graphs, and that keep packed documents apart.
MIXTURES = [name for name, keys in NETWORKS.items() if "moe_num_experts" in keys]
EXPLICIT_NETWORKS = ("gemma", "sinks")  # whose scores no flash kernel computes
PLAIN_NETWORKS = [
    name for name, keys in NETWORKS.items() if "attention_config" not in keys and name not in EXPLICIT_NETWORKS
]
CACHED_NETWORKS = {
    name: keys for name, keys in NETWORKS.items() if all(kind.keeps != "nothing" for kind in block_kinds_of(keys))
}
RECORDED_NETWORKS = {name: keys for name, keys in CACHED_NETWORKS.items() if name not in MIXTURES}
PACKED_NETWORKS = [name for name in NETWORKS if name != "soft_prompt"]


def networks_for(tp_size: int) -> dict[str, dict[str, Any]]:
    """Return the networks whose heads can be divided over so many tensor ranks."""
    return {name: keys for name, keys in NETWORKS.items() if keys.get("num_kv_heads", tp_size) % tp_size == 0}


def plan_of(world_size: int = 1, vocab_size: int = 100, **keys: Any) -> RunPlan:
    """Resolve flat keys as they are."""
    return resolve(NeoXConfig.from_flat(keys), world_size, vocab_size)


def small_plan(world_size: int = 1, vocab_size: int = 100, **keys: Any) -> RunPlan:
    """Resolve `SMALL` with further flat keys."""
    return plan_of(world_size, vocab_size, **{**SMALL, **keys})


def problems_of(world_size: int = 1, vocab_size: int = 100, /, **keys: Any) -> tuple[Problem, ...]:
    """Return the problems for which flat keys do not resolve; none if they do."""
    try:
        resolve(NeoXConfig.from_flat(keys), world_size, vocab_size)
    except ConfigError as error:
        return error.problems
    return ()


def problem_keys(world_size: int = 1, vocab_size: int = 100, /, **keys: Any) -> list[tuple[str, ...]]:
    """Return the keys of each problem for which flat keys do not resolve."""
    return [problem.keys for problem in problems_of(world_size, vocab_size, **keys)]


# Bidirectional networks, in BERT's form and in Megatron-LM's: keys beside `SMALL`.
_ENCODER = {"objective": "masked_lm", "pos_emb": "learned", "no_weight_tying": False, "max_preds_per_seq": 4}
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {**_ENCODER, "norm_placement": "post", "embed_layernorm": True, "layernorm_epsilon": 1e-12},
    "megatron_bert": {**_ENCODER},
    "rotary without sentences": {**_ENCODER, "pos_emb": "rotary", "norm": "rmsnorm", "bert_binary_head": False},
}
