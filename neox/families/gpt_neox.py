"""GPT-NeoX (`GPTNeoXForCausalLM`): GPT-NeoX-20B, Pythia.

Source: transformers, models/gpt_neox. Fused query_key_value weights have rows [heads, 3, head_dim] on both sides.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from neox.architecture import Architecture
from neox.errors import ConversionError
from neox.families.family import DTYPES, Family, ModelSettings, TensorSource

_ACTIVATIONS = MappingProxyType({"gelu": "gelu", "gelu_tanh": "gelu_fast"})
_TANH_NAMES = ("gelu_fast", "gelu_new", "gelu_pytorch_tanh")


def _problems(architecture: Architecture) -> dict[str, str]:
    checks = (
        ("positions", architecture.positions == "rotary", "its positions are rotary"),
        ("norm", architecture.norm == "layernorm", "its norms are LayerNorm with weight and bias"),
        ("activation", architecture.activation in _ACTIVATIONS, "its activation is gelu (erf or tanh)"),
        ("attention", set(architecture.attention) == {"global"}, "its attention is causal over the whole sequence"),
    )
    return {field: reason for field, holds, reason in checks if not holds}


def _write_config(architecture: Architecture, settings: ModelSettings) -> dict[str, Any]:
    """Return `config.json`; transformers 4 reads `rotary_pct`, transformers 5 `rope_parameters`."""
    fraction, base = architecture.rotary_fraction, architecture.rotary_base
    return {
        "architectures": [GPT_NEOX.class_name],
        "model_type": GPT_NEOX.model_type,
        "hidden_size": architecture.hidden_size,
        "num_hidden_layers": architecture.num_layers,
        "num_attention_heads": architecture.num_attention_heads,
        "intermediate_size": architecture.mlp_width,
        "hidden_act": _ACTIVATIONS[architecture.activation],
        "max_position_embeddings": architecture.max_positions,
        "layer_norm_eps": architecture.norm_epsilon,
        "use_parallel_residual": architecture.residual == "parallel",
        "tie_word_embeddings": architecture.tie_word_embeddings,
        "attention_bias": True,
        "attention_dropout": settings.attention_dropout,
        "hidden_dropout": settings.hidden_dropout,
        "rotary_pct": fraction,
        "rotary_emb_base": int(base) if base.is_integer() else base,
        "rope_parameters": {"rope_type": "default", "rope_theta": base, "partial_rotary_factor": fraction},
        **settings.common_keys,
    }


def _read_config(hf: Mapping[str, Any]) -> tuple[Architecture, ModelSettings]:
    problems = []
    activation = hf.get("hidden_act", "gelu")
    if activation != "gelu" and activation not in _TANH_NAMES:
        problems.append(f"hidden_act: {activation}: only gelu and {', '.join(_TANH_NAMES)} are supported")
    if hf.get("attention_bias", True) is False:
        problems.append("attention_bias: false: attention always has biases here")
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        problems.append(f"rope type {kind}: scaled rotary positions are not supported")
    if problems:
        raise ConversionError("this Hugging Face model cannot be imported:\n  " + "\n  ".join(problems))
    hidden, heads, layers = (
        hf.get(key, default)
        for key, default in (("hidden_size", 6144), ("num_attention_heads", 64), ("num_hidden_layers", 44))
    )
    architecture = Architecture(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        mlp_width=hf.get("intermediate_size", 4 * hidden),
        activation="gelu" if activation == "gelu" else "gelu_tanh",
        norm="layernorm",
        norm_epsilon=hf.get("layer_norm_eps", 1e-5),
        positions="rotary",
        rotary_ndims=int(hidden // heads * rope.get("partial_rotary_factor", hf.get("rotary_pct", 0.25))),
        rotary_base=float(rope.get("rope_theta", hf.get("rotary_emb_base", 10000))),
        max_positions=hf.get("max_position_embeddings", 2048),
        attention=("global",) * layers,
        residual="parallel" if hf.get("use_parallel_residual", True) else "sequential",
        tie_word_embeddings=hf.get("tie_word_embeddings", False),
    )
    settings = ModelSettings(
        dtype=dict(DTYPES).get(str(hf.get("torch_dtype", hf.get("dtype", "float32"))), "fp32"),
        initializer_range=hf.get("initializer_range", 0.02),
        attention_dropout=hf.get("attention_dropout", 0.0),
        hidden_dropout=hf.get("hidden_dropout", 0.0),
        vocab_size=hf.get("vocab_size", 50432),
        eod=hf.get("eos_token_id"),
    )
    return architecture, settings


GPT_NEOX = Family(
    model_type="gpt_neox",
    class_name="GPTNeoXForCausalLM",
    title="GPT-NeoX",
    problems=_problems,
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
