"""OLMo Hybrid (`OlmoHybridForCausalLM`): OLMo-2's blocks of attention, and three of four with gated linear attention.

Source: transformers, models/olmo_hybrid. Blocks of linear attention have norms before their sublayers, as Llama does,
those of attention norms of the results, as OLMo-2 does. Released models have no positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from neox.architecture import Architecture
from neox.families.config_entries import (
    ATTENTION_BIASES_EQUAL,
    ConfigEntries,
    Derived,
    Dropout,
    Fields,
    ModelSettings,
    Number,
    Size,
    Switch,
    Written,
    hidden_per_head,
    is_whole_number,
    query_heads,
)
from neox.families.family import Family, TensorSource
from neox.families.linear_attention import MULTI_TOKEN, LinearAndFull, delta_tensors, linear_entries, linear_modules
from neox.families.llama_like import BASE_PREFIX, BUFFERS
from neox.families.olmo2 import OLMO2
from neox.families.shared_entries import Activation, Rotary, ending_entries


class _RotaryOrNone(Rotary):
    """Rotary positions, or none if the base in `rope_parameters` is null."""

    def problems(self, hf: Mapping[str, Any]) -> Iterator[str]:
        """Yield the reasons against rotary positions, if there are some."""
        if _has_positions(hf):
            yield from super().problems(hf)

    def read(self, hf: Mapping[str, Any], known: Fields) -> Fields:
        """Return the fields of rotary positions, or those of none."""
        if _has_positions(hf):
            return super().read(hf, known)
        return {"positions": "none", "rotary_base": 0.0, "rotary_ndims": 0, "rope_scaling": ()}

    def write(self, network: Architecture, settings: ModelSettings) -> Mapping[str, Any]:
        """Return the entries."""
        if network.positions == "none":
            return {"rope_parameters": {"rope_type": "default", "rope_theta": None}}
        return super().write(network, settings)


def _has_positions(hf: Mapping[str, Any]) -> bool:
    rope = hf.get("rope_parameters")
    return not isinstance(rope, Mapping) or rope.get("rope_theta", 0) is not None


_PROJECTIONS = linear_modules("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj")


class _HeadsOfKeys(ConfigEntries):
    """The width of a key, which follows from the hidden size if no entry gives it."""

    def problems(self, hf: Mapping[str, Any]) -> Iterator[str]:
        """Yield a reason if it is 0."""
        heads = hf.get("linear_num_key_heads") or hf.get("num_attention_heads", 30)
        hidden = hf.get("hidden_size", 3840)
        if hf.get("linear_key_head_dim") is not None or not is_whole_number(heads) or not is_whole_number(hidden):
            return
        if heads > 0 and 3 * hidden < 4 * heads:
            yield f"linear_key_head_dim is missing, and 0.75 x hidden_size {hidden} / {heads} heads is less than 1"


def _key_dim(known: Fields) -> int:
    return int(0.75 * known["hidden_size"] / known["linear_key_heads"])


OLMO_HYBRID = Family(
    model_type="olmo_hybrid",
    class_name="OlmoHybridForCausalLM",
    title="OLMo Hybrid",
    fixed_fields={**OLMO2.fixed_fields, "linear_residual": "sequential", "linear_norm_epsilon": 1e-5},
    config=(
        Size("num_hidden_layers", "num_layers", 32),
        Size("hidden_size", "hidden_size", 3840),
        Size("num_attention_heads", "num_attention_heads", 30),
        Size("num_key_value_heads", "num_kv_heads", query_heads, null=query_heads),
        Derived("head_dim", hidden_per_head),
        Size("intermediate_size", "mlp_width", 11008),
        Activation("hidden_act", {"swiglu": "silu"}, "silu"),
        Size("max_position_embeddings", "max_positions", 65536),
        Switch("tie_word_embeddings", "tie_word_embeddings", default=False),
        Number("rms_norm_eps", "norm_epsilon", 1e-6),
        _HeadsOfKeys(),
        LinearAndFull(needs_both=True),
        *linear_entries(
            key_heads=query_heads,
            value_heads=query_heads,
            key_dim=_key_dim,
            value_dim=lambda known: 2 * known["linear_key_dim"],
        ),
        Switch("linear_allow_neg_eigval", "linear_negative_eigenvalues", default=True),
        _RotaryOrNone(),
        Dropout("attention_dropout", "attention_dropout"),
        Switch("attention_bias", "qkv_bias", default=False),
        ATTENTION_BIASES_EQUAL,
        # its default in transformers, 100277, would keep the embedding of that token from being trained there
        Written("pad_token_id", None),
        *ending_entries(100352),
    ),
    tensors={
        **OLMO2.tensors,
        "block": {
            **OLMO2.tensors["block"],
            **delta_tensors(
                projection=TensorSource(_PROJECTIONS, layout="delta_heads"),
                # transformers 5.24 writes three equal parts, whatever the widths of keys and values
                convolution=TensorSource(
                    linear_modules("q_conv1d", "k_conv1d", "v_conv1d"), layout="delta_heads", cut_anywhere=True
                ),
                norm="o_norm",
                output="o_proj",
            ),
        },
    },
    base_prefix=BASE_PREFIX,
    key_aliases={
        "attention_layer_norm.weight": "input_layernorm.weight",
        "feedforward_layer_norm.weight": "post_attention_layernorm.weight",
    },
    buffers=BUFFERS,
    ignored=MULTI_TOKEN,
)
