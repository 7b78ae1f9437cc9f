"""What Llama and the families derived from it have in common: names of tensors and entries of `config.json`.

They have RMSNorm before attention and MLP, rotary positions, fewer key heads than query heads, and a gated MLP without
biases; `llama_like` builds a family from what differs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from neox.architecture import Architecture
from neox.families.config_json import (
    GATED_ACTIVATIONS,
    SHAPE,
    check_entries,
    read_rotary,
    read_shape,
    write_rotary,
    write_shape,
)
from neox.families.family import Family, ModelSettings, TensorSource

_DEFAULTS = MappingProxyType(
    {"hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
)
_NEEDED = ("vocab_size", "hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size")
_SHAPE = MappingProxyType({**SHAPE, "norm_epsilon": "rms_norm_eps"})
_BLOCK = MappingProxyType(
    {
        "input_layernorm": ("input_layernorm",),
        "attention.query_key_value": tuple(f"self_attn.{name}_proj" for name in "qkv"),
        "attention.dense": ("self_attn.o_proj",),
        "post_attention_layernorm": ("post_attention_layernorm",),
        "mlp.dense_h_to_4h": ("mlp.up_proj", "mlp.gate_proj"),
        "mlp.dense_4h_to_h": ("mlp.down_proj",),
    }
)


def llama_like(
    *,
    model_type: str,
    class_name: str,
    title: str,
    fields: Callable[[Mapping[str, Any]], dict[str, Any]],
    entries: Callable[[Architecture], dict[str, Any]],
    defaults: Mapping[str, Any],
    modules: Mapping[str, str] = MappingProxyType({}),
) -> Family:
    """Return the family of an architecture like Llama.

    Args:
        model_type: As in `config.json`.
        class_name: Model class, as in `architectures` of `config.json`.
        title: Name for messages and model cards.
        fields: Contents of `config.json` -> fields of `Architecture` that differ from Llama without biases.
        entries: Architecture -> entries of `config.json` that not all families like Llama have.
        defaults: Values of missing entries of `config.json`.
        modules: Our module of a block -> Hugging Face's, where it is not Llama's.
    """

    def write_config(architecture: Architecture, settings: ModelSettings) -> dict[str, Any]:
        shared = _entries(architecture)
        return {**shared, "attention_dropout": settings.attention_dropout, **entries(architecture)}

    def read_config(given: Mapping[str, Any]) -> tuple[Architecture, ModelSettings]:
        check_entries(given, needed=_NEEDED)
        hf = {**_DEFAULTS, **defaults, **given}
        return replace(_read(hf), **fields(hf)), ModelSettings.read(hf)

    block = {**_BLOCK, **{ours: (theirs,) for ours, theirs in modules.items()}}
    return Family(
        model_type=model_type,
        class_name=class_name,
        title=title,
        write_config=write_config,
        read_config=read_config,
        tensors=MappingProxyType(
            {
                "embedding": {"word_embeddings": TensorSource(("model.embed_tokens",))},
                "block": {
                    ours: TensorSource(
                        tuple("model.layers.{i}." + name for name in theirs),
                        layout="heads" if ours == "attention.query_key_value" else "same",
                    )
                    for ours, theirs in block.items()
                },
                "norm": {"norm": TensorSource(("model.norm",))},
                "head": {"final_linear": TensorSource(("lm_head",))},
            }
        ),
        base_prefix="model.",
        buffers=(".rotary_emb.inv_freq",),
    )


def window_fields(layers: int, window: int | None, windowed: Callable[[int], bool] = lambda _: True) -> dict[str, Any]:
    """Return the fields of attention in a sliding window.

    Args:
        layers: Blocks.
        window: Keys that a query sees, itself included; None for all.
        windowed: Number of a block -> whether its attention has the window.
    """
    kinds = tuple("sliding_window" if window and windowed(layer) else "global" for layer in range(layers))
    return {"attention": kinds, "window": window if window and "sliding_window" in kinds else 0}


def _entries(architecture: Architecture) -> dict[str, Any]:
    return {
        **write_shape(architecture, GATED_ACTIVATIONS, _SHAPE),
        "num_key_value_heads": architecture.num_kv_heads,
        "head_dim": architecture.head_dim,
        **write_rotary(architecture),
    }


def _read(hf: Mapping[str, Any]) -> Architecture:
    shape = read_shape(hf, GATED_ACTIVATIONS, _SHAPE)
    base, _, scaling = read_rotary(hf)
    return Architecture(
        **shape,
        norm="rmsnorm",
        qkv_bias=False,
        attention_output_bias=False,
        mlp_bias=False,
        residual="sequential",
        positions="rotary",
        rotary_ndims=shape["head_dim"],
        rotary_base=base,
        rope_scaling=scaling,
    )
