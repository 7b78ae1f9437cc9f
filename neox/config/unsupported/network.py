"""Keys of the network: positions, shapes, attention, experts."""

from __future__ import annotations

from collections.abc import Iterator

from neox.config.unsupported.key import UnsupportedKey, keys


def positions_and_norms() -> Iterator[UnsupportedKey]:
    """Yield keys about positions and norms."""
    model = "model"
    yield from keys(model, "v2.0", "dormant", "used with norm: rmsnorm", ("rms_norm_epsilon", "float", 1e-8))
    yield from keys(model, "v2.0", "dormant", "used with norm: scalenorm", ("scalenorm_epsilon", "float", 1e-8))
    yield from keys(
        model,
        "v2.0",
        "dormant",
        "used with pos_emb: rpe",
        ("rpe_num_buckets", "int", 32),
        ("rpe_max_distance", "int", 128),
    )
    yield from keys(
        model,
        "v2.0",
        "refused",
        "offsets learned positions, not implemented",
        ("opt_pos_emb_offset", "int", 0),
    )
    yield from keys(model, "v2.0", "dormant", "used with attention kind gmlp or amlp", ("gmlp_attn_dim", "int", 64))


def network_shapes() -> Iterator[UnsupportedKey]:
    """Yield keys about network shapes."""
    model = "model"
    yield from keys(model, "v2.0", "refused", "use gpt_j_residual alone", ("gpt_j_tied", "bool", False))
    yield from keys(
        model,
        "v2.0",
        "refused",
        "sparse attention is not implemented; use attention kind global or flash",
        ("sparsity_config", "dict", None),
    )
    yield from keys(model, "v2.0", "refused", "layers do not share parameters here", ("num_unique_layers", "int", None))
    yield from keys(model, "v2.0", "dormant", "used with num_unique_layers", ("param_sharing_style", "str", "grouped"))
    yield from keys(model, "v2.0", "refused", "soft prompts are not implemented", ("soft_prompt_tuning", "dict", None))
    yield from keys(
        model,
        "later",
        "refused",
        "the MLP is 4 x hidden_size wide, as in v2.0",
        ("intermediate_size", "int", None),
        ("mlp_multiple_of", "int", 1),
        ("expansion_factor", "float", None),
    )
    yield from keys(
        model, "later", "refused", "every head has keys and values of its own", ("num_kv_heads", "int", None)
    )
    yield from keys(
        model, "later", "refused", "attention reaches over the whole sequence", ("sliding_window_width", "int", None)
    )
    yield from keys(
        model, "later", "refused", "queries and keys are not normalised", ("use_qk_layernorm", "bool", False)
    )
    yield from keys(
        model,
        "later",
        "refused",
        "every norm and linear layer of GPT-NeoX has a bias",
        ("use_bias_in_norms", "bool", True),
        ("use_bias_in_attn_linear", "bool", True),
        ("use_bias_in_mlp", "bool", True),
    )
    yield from keys(
        model,
        "later",
        "dormant",
        "used with the rwkv architecture",
        ("dim_att", "int", None),
        ("head_size", "int", None),
        ("ffn_dim", "int", None),
    )
    yield from keys(
        model,
        "later",
        "dormant",
        "used with the mamba architecture",
        ("mamba_selective_scan_fusion", "bool", False),
        ("mamba_causal_conv_fusion", "bool", False),
        ("mamba_inner_func_fusion", "bool", False),
        ("mamba_selective_fp32_params", "bool", True),
        ("mamba_use_bias_in_conv", "bool", True),
        ("mamba_use_bias_in_linears", "bool", False),
    )
    yield from keys(
        model,
        "later",
        "refused",
        "mixture of experts is not implemented",
        ("moe_num_experts", "int", 1),
    )
    yield from keys(
        model,
        "later",
        "dormant",
        "used with moe_num_experts",
        ("moe_expert_interval", "int", 1),
        ("moe_top_k", "int", 1),
        ("moe_router_type", "str", "sinkhorn"),
        ("moe_lbl_in_fp32", "bool", False),
        ("moe_jitter_eps", "float", None),
    )
