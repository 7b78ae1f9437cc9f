"""Bamba (`BambaForCausalLM`): Llama's blocks, most of which have a Mamba-2 mixer in attention's place.

Source: transformers, models/bamba.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from neox.architecture import WITHOUT_ATTENTION, Architecture
from neox.families.config_entries import (
    ATTENTION_BIASES_EQUAL,
    ConfigEntries,
    Derived,
    Dropout,
    Fields,
    Number,
    Size,
    Switch,
    Written,
    hidden_per_head,
    is_whole_number,
    query_heads,
)
from neox.families.family import Family, TensorSource, same_tensors, separate_projections
from neox.families.llama_like import BASE_PREFIX, BUFFERS, NETWORK
from neox.families.mamba2 import Expansion, NoStepLimit
from neox.families.shared_entries import Activation, Rotary, ending_entries

_BLOCK = "model.layers.{i}."
_INDICES = "attn_layer_indices"
_HEAD_DIM = "mamba_d_head"


@dataclass(frozen=True)
class AttentionBlocks(ConfigEntries):
    """`attn_layer_indices`, the numbers of the blocks with attention; null for none. The others are recurrent."""

    def problems(self, hf: Mapping[str, Any]) -> Iterator[str]:
        """Yield a reason if it is no list of numbers of blocks."""
        numbers = hf.get(_INDICES) or []
        layers = hf.get("num_hidden_layers", 32)
        if not isinstance(numbers, list) or not all(is_whole_number(n) and 0 <= n < layers for n in numbers):
            yield f"{_INDICES}: {numbers!r}: should be a list of numbers below num_hidden_layers: {layers}"

    def read(self, hf: Mapping[str, Any], known: Fields) -> Fields:
        """Return the kinds of blocks."""
        numbers = hf.get(_INDICES) or []
        kinds = tuple("global" if block in numbers else "mamba2_mlp" for block in range(known["num_layers"]))
        return {"attention": kinds}

    def write(self, network: Architecture, settings: Any) -> Mapping[str, Any]:
        """Return the numbers."""
        return {_INDICES: [block for block, kind in enumerate(network.attention) if kind != "mamba2_mlp"]}


@dataclass(frozen=True)
class MixerSize(Size):
    """A size of the mixers. A network without any is written with transformers' default, and so not expressible."""

    def write(self, network: Architecture, settings: Any) -> Mapping[str, Any]:
        """Return the entry."""
        return {self.key: getattr(network, self.field) or self.default}


@dataclass(frozen=True)
class MixerHeads(MixerSize):
    """`mamba_d_head`, the channels of a mixer's head, which may be `auto`: they follow from `mamba_expand` then."""

    def is_right(self, value: Any) -> bool:
        """Return whether a value has the right type and size."""
        return value == "auto" or super().is_right(value)

    def read(self, hf: Mapping[str, Any], known: Fields) -> Fields:
        """Return the field."""
        found = super().read(hf, known)
        if found[self.field] == "auto":
            return {self.field: hf.get("mamba_expand", 2) * known["hidden_size"] // known["mamba_heads"]}
        return found


@dataclass(frozen=True)
class HalfRotary(Rotary):
    """Rotary positions of half of each head: transformers reads no other fraction."""

    fraction_key: str = "partial_rotary_factor"
    default_fraction: float = 0.5

    def problems(self, hf: Mapping[str, Any]) -> Iterator[str]:
        """Yield a reason if the file gives another fraction."""
        yield from super().problems(hf)
        rope = hf.get("rope_parameters") or {}
        if not isinstance(rope, Mapping):
            return  # which is a reason of its own, above
        given = rope.get(self.fraction_key, hf.get(self.fraction_key, 0.5))
        if given != self.default_fraction:
            yield f"{self.fraction_key}: {given!r}: only 0.5 is supported for this family"

    def write(self, network: Architecture, settings: Any) -> Mapping[str, Any]:
        """Return the entries, with the fraction that transformers takes."""
        entries = dict(super().write(network, settings))
        entries["rope_parameters"] = {**entries["rope_parameters"], self.fraction_key: self.default_fraction}
        return {**entries, self.fraction_key: self.default_fraction}


class NoAttention(ConfigEntries):
    """What attention's entries mean in a model without any block that has it: nothing."""

    def read(self, hf: Mapping[str, Any], known: Fields) -> Fields:
        """Return the fields of attention in such a model."""
        if "global" in known["attention"]:
            return {}
        return {**WITHOUT_ATTENTION, "positions": "none"}


BAMBA = Family(
    model_type="bamba",
    class_name="BambaForCausalLM",
    title="Bamba",
    fixed_fields=NETWORK,
    config=(
        Size("num_hidden_layers", "num_layers", 32),
        Size("hidden_size", "hidden_size", 4096),
        AttentionBlocks(),
        Size("num_attention_heads", "num_attention_heads", 32),
        Size("num_key_value_heads", "num_kv_heads", 8, null=query_heads),
        Derived("head_dim", hidden_per_head),
        Size("intermediate_size", "mlp_width", 14336),
        Activation("hidden_act", {"swiglu": "silu"}, "silu"),  # theirs is also that of the mixers
        Size("max_position_embeddings", "max_positions", 262144),
        Switch("tie_word_embeddings", "tie_word_embeddings", default=False),
        Number("rms_norm_eps", "norm_epsilon", 1e-5),
        HalfRotary(),
        Dropout("attention_dropout", "attention_dropout"),
        Switch("attention_bias", "qkv_bias", default=False),
        ATTENTION_BIASES_EQUAL,
        Switch("mlp_bias", "mlp_bias", default=False),
        MixerSize("mamba_n_heads", "mamba_heads", 128),
        MixerHeads(_HEAD_DIM, "mamba_head_dim", "auto"),
        Expansion("mamba_expand", "mamba_n_heads", _HEAD_DIM),
        MixerSize("mamba_n_groups", "mamba_groups", 1),
        MixerSize("mamba_d_state", "mamba_state", 256),
        MixerSize("mamba_d_conv", "mamba_conv", 4),
        Switch("mamba_conv_bias", "mamba_conv_bias", default=True),
        Switch("mamba_proj_bias", "mamba_linear_bias", default=False),
        NoStepLimit(),
        NoAttention(),
        Written("pad_token_id", None),
        *ending_entries(vocab_size=128000),
    ),
    tensors={
        "embedding": {"word_embeddings": TensorSource(("model.embed_tokens",))},
        "block": {
            "attention.query_key_value": separate_projections(f"{_BLOCK}self_attn."),
            "attention.dense": TensorSource((f"{_BLOCK}self_attn.o_proj",)),
            "mlp.dense_h_to_4h": TensorSource((f"{_BLOCK}feed_forward.up_proj", f"{_BLOCK}feed_forward.gate_proj")),
            **same_tensors(
                _BLOCK,
                {
                    "input_layernorm": "input_layernorm",
                    "post_attention_layernorm": "pre_ff_layernorm",
                    "mlp.dense_4h_to_h": "feed_forward.down_proj",
                    "mixer": "mamba",
                    "mixer.in_proj": "mamba.in_proj",
                    "mixer.conv1d": "mamba.conv1d",
                    "mixer.norm": "mamba.norm",
                    "mixer.out_proj": "mamba.out_proj",
                },
            ),
        },
        "norm": {"norm": TensorSource(("model.final_layernorm",))},
        "head": {"final_linear": TensorSource(("lm_head",))},
    },
    base_prefix=BASE_PREFIX,
    buffers=BUFFERS,
)
