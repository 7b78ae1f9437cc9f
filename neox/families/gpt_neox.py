"""GPT-NeoX (`GPTNeoXForCausalLM`): GPT-NeoX-20B, Pythia.

Source: transformers, models/gpt_neox. Fused query_key_value weights have rows [heads, 3, head_dim] on both sides.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from neox.architecture import Architecture
from neox.families.config_json import PLAIN_ACTIVATIONS, read_activation, read_rotary, write_rotary
from neox.families.family import Family, ModelSettings, TensorSource

_ACTIVATIONS = MappingProxyType({**PLAIN_ACTIVATIONS, "gelu_tanh": "gelu_fast"})
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
        "hidden_size": architecture.hidden_size,
        "num_hidden_layers": architecture.num_layers,
        "num_attention_heads": architecture.num_attention_heads,
        "intermediate_size": architecture.mlp_width,
        "hidden_act": _ACTIVATIONS.get(architecture.activation, "gelu"),
        "max_position_embeddings": architecture.max_positions,
        "layer_norm_eps": architecture.norm_epsilon,
        "use_parallel_residual": architecture.residual == "parallel",
        "tie_word_embeddings": architecture.tie_word_embeddings,
        "attention_bias": architecture.qkv_bias,
        "attention_dropout": settings.attention_dropout,
        "hidden_dropout": settings.hidden_dropout,
        "rotary_pct": architecture.rotary_fraction,
        **rotary,
    }


def _read_config(given: Mapping[str, Any]) -> tuple[Architecture, ModelSettings]:
    hf = {**_DEFAULTS, **given}
    hidden, heads, layers = hf["hidden_size"], hf["num_attention_heads"], hf["num_hidden_layers"]
    base, fraction, scaling = read_rotary(hf, base="rotary_emb_base", fraction="rotary_pct")
    architecture = Architecture(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        mlp_width=hf["intermediate_size"],
        activation=read_activation(hf, "hidden_act", _ACTIVATIONS),
        norm="layernorm",
        norm_epsilon=hf["layer_norm_eps"],
        qkv_bias=hf["attention_bias"],
        attention_output_bias=hf["attention_bias"],
        positions="rotary",
        rotary_ndims=int(hidden // heads * (fraction or 0.25)),
        rotary_base=base,
        rope_scaling=scaling,
        max_positions=hf["max_position_embeddings"],
        attention=("global",) * layers,
        residual="parallel" if hf["use_parallel_residual"] else "sequential",
        tie_word_embeddings=hf["tie_word_embeddings"],
    )
    return architecture, ModelSettings.read(hf, hidden_dropout="hidden_dropout")


GPT_NEOX = Family(
    model_type="gpt_neox",
    class_name="GPTNeoXForCausalLM",
    title="GPT-NeoX",
    transformers="4.57",
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
