"""GPT-2 (`GPT2LMHeadModel`), and the form of Megatron-LM's GPT in transformers.

Source: transformers, models/gpt2. Weights are those of Conv1D: [in, out].
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from neox.architecture import Architecture
from neox.families.config_json import PLAIN_ACTIVATIONS, check_entries, read_shape, write_shape
from neox.families.family import Family, ModelSettings, TensorSource

_DEFAULTS = MappingProxyType(
    {
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "attn_pdrop": 0.1,
        "resid_pdrop": 0.1,
        "embd_pdrop": 0.1,
    }
)
_FIXED = MappingProxyType(
    {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}
)


_SHAPE = MappingProxyType(
    {
        "num_layers": "n_layer",
        "hidden_size": "n_embd",
        "num_attention_heads": "n_head",
        "mlp_width": "n_inner",
        "activation": "activation_function",
        "max_positions": "n_positions",
        "norm_epsilon": "layer_norm_epsilon",
        "tie_word_embeddings": "tie_word_embeddings",
    }
)


def write_entries(architecture: Architecture, settings: ModelSettings) -> dict[str, Any]:
    """Return the entries of `config.json` that GPT-2 and GPT-J share."""
    return {
        **write_shape(architecture, PLAIN_ACTIVATIONS, _SHAPE),
        "attn_pdrop": settings.attention_dropout,
        "resid_pdrop": settings.hidden_dropout,
        "embd_pdrop": settings.hidden_dropout,
    }


def read_fields(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `Architecture` that GPT-2 and GPT-J share."""
    whole = {**hf, "n_inner": hf.get("n_inner") or 4 * hf["n_embd"]}
    return {"norm": "layernorm", **read_shape(whole, PLAIN_ACTIVATIONS, _SHAPE)}


def read_settings(hf: Mapping[str, Any]) -> ModelSettings:
    """Return the settings of GPT-2 and GPT-J."""
    return ModelSettings.read(hf, attention_dropout="attn_pdrop", hidden_dropout="resid_pdrop")


def _read_config(given: Mapping[str, Any]) -> tuple[Architecture, ModelSettings]:
    check_entries(given, fixed=_FIXED)
    hf = {**_DEFAULTS, **given}
    architecture = Architecture(
        residual="sequential", positions="learned", rotary_ndims=0, rotary_base=0.0, **read_fields(hf)
    )
    return architecture, read_settings(hf)


GPT2 = Family(
    model_type="gpt2",
    class_name="GPT2LMHeadModel",
    title="GPT-2",
    write_config=write_entries,
    read_config=_read_config,
    tensors=MappingProxyType(
        {
            "embedding": {
                "word_embeddings": TensorSource(("transformer.wte",)),
                "position_embeddings": TensorSource(("transformer.wpe",)),
            },
            "block": {
                "input_layernorm": TensorSource(("transformer.h.{i}.ln_1",)),
                "attention.query_key_value": TensorSource(
                    ("transformer.h.{i}.attn.c_attn",), transpose=True, layout="heads"
                ),
                "attention.dense": TensorSource(("transformer.h.{i}.attn.c_proj",), transpose=True),
                "post_attention_layernorm": TensorSource(("transformer.h.{i}.ln_2",)),
                "mlp.dense_h_to_4h": TensorSource(("transformer.h.{i}.mlp.c_fc",), transpose=True),
                "mlp.dense_4h_to_h": TensorSource(("transformer.h.{i}.mlp.c_proj",), transpose=True),
            },
            "norm": {"norm": TensorSource(("transformer.ln_f",))},
            "head": {"final_linear": TensorSource(("lm_head",))},
        }
    ),
    base_prefix="transformer.",
    buffers=(".attn.bias", ".attn.masked_bias"),
)
