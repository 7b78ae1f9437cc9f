"""What decides the function that a network computes: two configurations that agree here can share weights."""

from __future__ import annotations

from typing import Any

from neox.config.sections import NeoXConfig


def network_settings(config: NeoXConfig) -> dict[str, Any]:
    """Return key -> value of sizes and of what else decides the function; degrees, precision and padding do not."""
    model = config.model
    return {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "gpt_j_residual": model.gpt_j_residual,
        "no_weight_tying": model.no_weight_tying,
        "norm": model.norm,
        "layernorm_epsilon": model.layernorm_epsilon,
        "pos_emb": model.pos_emb,
        "rotary_pct": model.rotary_pct,
        "rotary_emb_base": model.rotary_emb_base,
        "bias_gelu_fusion": model.bias_gelu_fusion,
        "activation": model.activation,
    }
