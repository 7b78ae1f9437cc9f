"""GPT-NeoX (`GPTNeoXForCausalLM`): GPT-NeoX-20B, Pythia.

Source: transformers, models/gpt_neox. Fused query_key_value weights have rows [heads, 3, head_dim] on both sides.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from neox.architecture import Architecture
from neox.families.config_json import PLAIN_ACTIVATIONS, SHAPE, read_rotary, read_shape, write_rotary, write_shape
from neox.families.family import Family, ModelSettings, TensorSource

_ACTIVATIONS = MappingProxyType({**PLAIN_ACTIVATIONS, "gelu_tanh": "gelu_fast"})
_SHAPE = MappingProxyType({**SHAPE, "norm_epsilon": "layer_norm_eps"})
_DEFAULTS = MappingProxyType(
    {
        "vocab_size": 50432,
        "hidden_size": 6144,
        "num_attention_heads": 64,
        "num_hidden_layers": 44,
        "intermediate_size": 24576,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "use_parallel_residual": True,
        "tie_word_embeddings": False,
        "attention_bias": True,
        "rotary_pct": 0.25,
    }
)


def _write_config(architecture: Architecture, settings: ModelSettings) -> dict[str, Any]:
    """Return `config.json`; transformers 4 reads `rotary_pct`, transformers 5 `rope_parameters`."""
    rotary = write_rotary(architecture, base="rotary_emb_base")
    rotary["rope_parameters"]["partial_rotary_factor"] = architecture.rotary_fraction
    return {
        **write_shape(architecture, _ACTIVATIONS, _SHAPE),
        "use_parallel_residual": architecture.residual == "parallel",
        "attention_bias": architecture.qkv_bias,
        "attention_dropout": settings.attention_dropout,
        "hidden_dropout": settings.hidden_dropout,
        "rotary_pct": architecture.rotary_fraction,
        **rotary,
    }


def _read_config(given: Mapping[str, Any]) -> tuple[Architecture, ModelSettings]:
    hf = {**_DEFAULTS, **given}
    shape = read_shape(hf, _ACTIVATIONS, _SHAPE)
    base, fraction, scaling = read_rotary(hf, base="rotary_emb_base", fraction="rotary_pct")
    architecture = Architecture(
        **shape,
        norm="layernorm",
        qkv_bias=hf["attention_bias"],
        attention_output_bias=hf["attention_bias"],
        positions="rotary",
        rotary_ndims=int(shape["head_dim"] * (fraction or 0.25)),
        rotary_base=base,
        rope_scaling=scaling,
        residual="parallel" if hf["use_parallel_residual"] else "sequential",
    )
    return architecture, ModelSettings.read(hf, hidden_dropout="hidden_dropout")


GPT_NEOX = Family(
    model_type="gpt_neox",
    class_name="GPTNeoXForCausalLM",
    title="GPT-NeoX",
    write_config=_write_config,
    read_config=_read_config,
    tensors=MappingProxyType(
        {
            "embedding": {"word_embeddings": TensorSource(("gpt_neox.embed_in",))},
            "block": {
                name: TensorSource(("gpt_neox.layers.{i}." + name,))
                for name in (
                    "input_layernorm",
                    "attention.query_key_value",
                    "attention.dense",
                    "post_attention_layernorm",
                    "mlp.dense_h_to_4h",
                    "mlp.dense_4h_to_h",
                )
            },
            "norm": {"norm": TensorSource(("gpt_neox.final_layer_norm",))},
            "head": {"final_linear": TensorSource(("embed_out",))},
        }
    ),
    base_prefix="gpt_neox.",
    key_aliases=MappingProxyType({"lm_head.weight": "embed_out.weight"}),
    buffers=(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),
)
