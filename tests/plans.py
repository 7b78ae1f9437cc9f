"""Small configurations and run plans for tests."""

from __future__ import annotations

from typing import Any

from neox.config import NeoXConfig, RunPlan, resolve

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

# Networks that tests of every network's properties build: keys beside `SMALL`.
NETWORKS: dict[str, dict[str, Any]] = {
    "rotary": {},
    "learned": {"pos_emb": "learned", "opt_pos_emb_offset": 2, "max_position_embeddings": 18},
    "sinusoidal": {"pos_emb": "sinusoidal", "norm": "scalenorm"},
    "alibi": {"pos_emb": "alibi", "norm": "rmsnorm", "gpt_j_residual": True},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}},
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
    "mup": {"use_mup": True, "mup_base_hidden_size": 16, "mup_output_temp": 0.5, "mup_embedding_mult": 2.0},
}

# Those whose blocks run any kernel of attention, and those that generate with a cache.
PLAIN_NETWORKS = [name for name, keys in NETWORKS.items() if "attention_config" not in keys]
CACHED_NETWORKS = {name: keys for name, keys in NETWORKS.items() if "mlp" not in name}


def plan_of(world_size: int = 1, vocab_size: int = 100, **keys: Any) -> RunPlan:
    """Resolve flat keys as they are."""
    return resolve(NeoXConfig.from_flat(keys), world_size, vocab_size)


def small_plan(world_size: int = 1, vocab_size: int = 100, **keys: Any) -> RunPlan:
    """Resolve `SMALL` with further flat keys."""
    return plan_of(world_size, vocab_size, **{**SMALL, **keys})
