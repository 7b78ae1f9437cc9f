"""Entries of `config.json` and names of tensors that Llama and the families derived from it have in common.

They have RMSNorm before attention and MLP, rotary positions, fewer key heads than query heads, and a gated MLP. A
family takes the pieces that it shares, and adds its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from neox.architecture import LayerKind
from neox.families.config_entries import (
    ConfigEntries,
    Dropout,
    Fields,
    Number,
    Rule,
    Size,
    Switch,
    hidden_per_head,
    query_heads,
)
from neox.families.family import TensorSource, same_tensors, separate_projections
from neox.families.shared_entries import GATED_ACTIVATIONS, Activation, Rotary

NETWORK: Fields = MappingProxyType(
    {
        "norm": "rmsnorm",
        "residual": "sequential",
        "qkv_bias": False,
        "attention_output_bias": False,
        "mlp_bias": False,
    }
)
"""Fields that all of them share, unless an entry says otherwise."""
NORMS_OF_HEADS: Mapping[str, str] = MappingProxyType(
    {"attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"}
)
"""Norms of queries and keys: our modules of a block -> theirs."""
BASE_PREFIX = "model."
BUFFERS = (".rotary_emb.inv_freq",)
_BLOCK = "model.layers.{i}."


def llama_entries(
    *,
    max_positions: int = 2048,
    norm_epsilon: float = 1e-6,
    num_kv_heads: int | Rule = query_heads,
    head_dim: int | Rule = hidden_per_head,
    rotary: ConfigEntries | None = None,
    tied: bool = False,
) -> tuple[ConfigEntries, ...]:
    """Return the entries with which the `config.json` of these families begins, without those of attention's kind.

    Args:
        max_positions: transformers' default of `max_position_embeddings`.
        norm_epsilon: transformers' default of `rms_norm_eps`.
        num_kv_heads: Value of a missing `num_key_value_heads`, or a rule for it.
        head_dim: Value of a missing `head_dim`, or a rule for it.
        rotary: The entries of rotary positions; those of Llama if None.
        tied: transformers' default of `tie_word_embeddings`.
    """
    return (
        Size("num_hidden_layers", "num_layers"),
        Size("hidden_size", "hidden_size"),
        Size("num_attention_heads", "num_attention_heads"),
        Size("intermediate_size", "mlp_width"),
        Activation("hidden_act", GATED_ACTIVATIONS, "silu"),
        Size("max_position_embeddings", "max_positions", max_positions),
        Switch("tie_word_embeddings", "tie_word_embeddings", default=tied),
        Number("rms_norm_eps", "norm_epsilon", norm_epsilon),
        Size("num_key_value_heads", "num_kv_heads", num_kv_heads, null=query_heads),
        Size("head_dim", "head_dim", head_dim, null=hidden_per_head),
        rotary or Rotary(),
        Dropout("attention_dropout", "attention_dropout"),
    )


def llama_tensors(
    extra: Mapping[str, str] = MappingProxyType({}), *, interleaved: bool = False, fused_gate: bool = False
) -> dict[LayerKind, Mapping[str, TensorSource]]:
    """Return the sources of all tensors.

    Args:
        extra: Extra modules of a block whose tensors are copied unchanged, our name -> theirs. They may replace others.
        interleaved: As of `TensorSource`.
        fused_gate: Whether gate and up projection are fused, gate first.
    """
    gate = TensorSource((f"{_BLOCK}mlp.up_proj", f"{_BLOCK}mlp.gate_proj"))
    if fused_gate:
        gate = TensorSource((f"{_BLOCK}mlp.gate_up_proj",), layout="swapped_halves")
    return {
        "embedding": {"word_embeddings": TensorSource(("model.embed_tokens",))},
        "block": {
            "input_layernorm": TensorSource((f"{_BLOCK}input_layernorm",)),
            "attention.query_key_value": separate_projections(f"{_BLOCK}self_attn.", interleaved=interleaved),
            "attention.dense": TensorSource((f"{_BLOCK}self_attn.o_proj",)),
            "post_attention_layernorm": TensorSource((f"{_BLOCK}post_attention_layernorm",)),
            "mlp.dense_h_to_4h": gate,
            "mlp.dense_4h_to_h": TensorSource((f"{_BLOCK}mlp.down_proj",)),
            **same_tensors(_BLOCK, extra),
        },
        "norm": {"norm": TensorSource(("model.norm",))},
        "head": {"final_linear": TensorSource(("lm_head",))},
    }
