"""Phi-3 and Phi-4 (`Phi3ForCausalLM`): Llama with fused projections, and partly rotated heads in Phi-4-mini.

Source: transformers, models/phi3. Models with 128k tokens scale frequencies by `longrope`, whose factor is
`max_position_embeddings` / `original_max_position_embeddings`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from neox.architecture import Architecture, rope_scaling_of, rope_scaling_settings
from neox.families.config_entries import (
    Derived,
    Dropout,
    Fields,
    ModelSettings,
    Number,
    Size,
    Switch,
    UnreadDropout,
    Written,
    hidden_per_head,
    is_number,
    is_whole_number,
    query_heads,
)
from neox.families.family import Family, TensorSource, same_tensors
from neox.families.llama_like import BASE_PREFIX, BUFFERS, NETWORK
from neox.families.shared_entries import (
    GATED_ACTIVATIONS,
    Activation,
    Rotary,
    WindowInAllBlocks,
    ending_entries,
)

_BLOCK = "model.layers.{i}."
_TRAINED = "original_max_position_embeddings"
_LISTS = ("short_factor", "long_factor")
_LONG_NAMES = ("longrope", "su", "yarn")
"""Names of `longrope` in files of this family."""


class LongRotary(Rotary):
    """Rotary positions, unscaled or with `longrope`. The length in training is a separate entry."""

    def problems(self, hf: Mapping[str, Any]) -> Iterator[str]:
        """Yield a reason for each invalid entry, and for entries that some versions of transformers ignore."""
        yield from Size(_TRAINED, _TRAINED, 4096).problems(hf)
        others = dict(hf)
        for key in ("rope_parameters", "rope_scaling"):
            given = hf.get(key)
            if not isinstance(given, Mapping) or given.get("rope_type", given.get("type")) not in _LONG_NAMES:
                continue
            others[key] = {name: given.get(name) for name in ("rope_theta", "partial_rotary_factor")}
            for name in _LISTS:
                numbers = given.get(name)
                if not isinstance(numbers, list) or not all(is_number(number) and number > 0 for number in numbers):
                    yield f"{key}: {name}: {numbers!r}: should be a list of numbers above 0"
            if given.get("attention_factor") is not None:
                yield f"{key}: attention_factor: {given['attention_factor']!r}: is not supported"
            trained = given.get(_TRAINED, hf.get(_TRAINED, 4096))
            longest = hf.get("max_position_embeddings", 4096)
            if not all(is_whole_number(length) and length > 1 for length in (trained, longest)) or longest < trained:
                yield f"{key}: {_TRAINED}: {trained!r}: should be 2 to max_position_embeddings: {longest!r}"
            elif given.get("factor") not in (None, longest / trained):
                yield f"{key}: factor: {given['factor']!r}: should be max_position_embeddings / {_TRAINED}"
        yield from super().problems(others)

    def read(self, hf: Mapping[str, Any], known: Fields) -> Fields:
        """Return the base, the number of rotary dimensions and the scaling."""
        found = super().read(hf, known)
        scaling = rope_scaling_settings(found["rope_scaling"])
        if not scaling:
            return found
        trained = scaling.get(_TRAINED, hf.get(_TRAINED, 4096))
        lists = {name: scaling[name] for name in _LISTS}
        factor = known["max_positions"] / trained
        scaling = {"rope_type": "longrope", "factor": factor, _TRAINED: trained, **lists}
        return {**found, "rope_scaling": rope_scaling_of(scaling)}

    def write(self, network: Architecture, settings: ModelSettings) -> Mapping[str, Any]:
        """Return the entries for transformers 4 and 5. Version 4 accepts only scalings of exactly three entries."""
        entries = dict(super().write(network, settings))
        scaling = rope_scaling_settings(network.rope_scaling)
        if scaling.get("rope_type") != "longrope":
            return entries
        del entries["rope_parameters"]
        entries["rope_scaling"] = {"type": "longrope", **{name: scaling[name] for name in _LISTS}}
        entries[_TRAINED] = scaling[_TRAINED]
        return entries


PHI3 = Family(
    model_type="phi3",
    class_name="Phi3ForCausalLM",
    score_class="Phi3ForSequenceClassification",
    title="Phi-3",
    fixed_fields=NETWORK,
    config=(
        Size("num_hidden_layers", "num_layers", 32),
        Size("hidden_size", "hidden_size", 3072),
        Size("num_attention_heads", "num_attention_heads", 32),
        Size("num_key_value_heads", "num_kv_heads", query_heads, null=query_heads),
        Derived("head_dim", hidden_per_head),
        Size("intermediate_size", "mlp_width", 8192),
        Activation("hidden_act", GATED_ACTIVATIONS, "silu"),
        Size("max_position_embeddings", "max_positions", 4096),
        Switch("tie_word_embeddings", "tie_word_embeddings", default=False),
        Number("rms_norm_eps", "norm_epsilon", 1e-5),
        LongRotary(fraction_key="partial_rotary_factor", takes_scaling=False),
        WindowInAllBlocks(default=None),
        Dropout("attention_dropout", "attention_dropout"),
        Dropout("resid_pdrop", "hidden_dropout"),
        UnreadDropout("embd_pdrop", "hidden_dropout"),
        # its default in transformers, 32000, would keep the embedding of that token from being trained there
        Written("pad_token_id", None),
        *ending_entries(32064),
    ),
    tensors={
        "embedding": {"word_embeddings": TensorSource(("model.embed_tokens",))},
        "block": {
            "attention.query_key_value": TensorSource((f"{_BLOCK}self_attn.qkv_proj",), layout="heads"),
            **same_tensors(
                _BLOCK,
                {
                    "input_layernorm": "input_layernorm",
                    "attention.dense": "self_attn.o_proj",
                    "post_attention_layernorm": "post_attention_layernorm",
                    "mlp.dense_4h_to_h": "mlp.down_proj",
                },
            ),
            "mlp.dense_h_to_4h": TensorSource((f"{_BLOCK}mlp.gate_up_proj",), layout="swapped_halves"),
        },
        "norm": {"norm": TensorSource(("model.norm",))},
        "head": {"final_linear": TensorSource(("lm_head",))},
    },
    base_prefix=BASE_PREFIX,
    buffers=BUFFERS,
)
