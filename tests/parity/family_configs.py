"""Random `config.json` of any family, drawn entry by entry from its description in `neox.families`.

A new family needs nothing here. An entry of a new type needs a line in `_values`, or in `SPECIAL` if it is of one
family only; an entry that is unknown here keeps transformers' default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hypothesis import strategies as st

from neox.families import FAMILIES
from neox.families.entries import (
    Bound,
    Choice,
    ConfigEntries,
    Entry,
    Factor,
    ScoreDivisor,
    Switch,
)
from neox.families.shared_entries import Activation, Rotary, TwoRotaries, WindowInAllBlocks, WindowPattern

COMMON = {"vocab_size": 90, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
SCALED = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
WINDOWS = st.integers(2, 30)  # the cache of transformers 5.23 forgets nothing with a window of 1
TEXT_FAMILIES = [name for name, family in FAMILIES.items() if not family.is_encoder]
_WINDOWS = {
    "use_sliding_window": st.booleans(),
    "sliding_window": WINDOWS,
    "max_window_layers": st.integers(0, 3),
}
SPECIAL: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "qwen2": st.fixed_dictionaries(_WINDOWS),
    "qwen3": st.fixed_dictionaries(_WINDOWS),
    "smollm3": st.fixed_dictionaries(
        {
            "no_rope_layer_interval": st.integers(1, 3),
            "use_sliding_window": st.booleans(),
            "sliding_window": st.none() | WINDOWS,
        }
    ),
    "falcon": st.sampled_from(
        [
            {"new_decoder_architecture": True},
            {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1},
            {"new_decoder_architecture": False, "multi_query": True, "num_kv_heads": None},
            {"new_decoder_architecture": False, "multi_query": False, "num_kv_heads": None},
            {"new_decoder_architecture": False, "multi_query": True, "parallel_attn": False, "num_kv_heads": None},
        ]
    ),
    **dict.fromkeys(
        ("qwen2_moe", "qwen3_moe"),
        st.sampled_from([{}, {"mlp_only_layers": [1]}, {"num_hidden_layers": 3, "decoder_sparse_step": 2}]),
    ),
    # without biases of their own, a tied head has none
    "gptj": st.just({"tie_word_embeddings": False}),
    "phi": st.just({"tie_word_embeddings": False}),
}
"""Family -> strategy of entries that only it has, or whose values depend on each other."""


@st.composite
def configs(draw: st.DrawFn, model_type: str) -> dict[str, Any]:
    """Draw the entries of a small model."""
    family = FAMILIES[model_type]
    fields = {entry.field for entry in family.config if isinstance(entry, Entry)}
    sizes = _sizes(draw, fields)
    found = dict(COMMON)
    for entry in family.config:
        found.update(_values(draw, entry, sizes))
    if "num_kv_heads" not in fields and model_type == "falcon":
        found["num_kv_heads"] = sizes["num_kv_heads"]
    if model_type in SPECIAL:
        found.update(draw(SPECIAL[model_type]))
    return found


def _sizes(draw: st.DrawFn, fields: set[str]) -> dict[str, Any]:
    """Draw sizes that belong together: field -> value."""
    key_heads = draw(st.integers(1, 3))
    heads = key_heads * draw(st.integers(1, 3))
    # a norm over very few dimensions turns rounding into differences
    head_dim = 2 * draw(st.integers(1 if heads >= 4 else 4, 8))
    hidden = heads * head_dim
    if "head_dim" in fields:
        hidden = heads * draw(st.integers(2 if heads >= 4 else 8, 12))
    return {
        "num_layers": draw(st.integers(1, 3)),
        "num_attention_heads": heads,
        "num_kv_heads": key_heads,
        "head_dim": head_dim,
        "hidden_size": hidden,
        "mlp_width": draw(st.integers(1, 90)),
        "max_positions": draw(st.integers(24, 100)),
        "norm_epsilon": draw(st.sampled_from([1e-6, 1e-5, 1e-3])),
        "initializer_range": 0.1,
        "vocab_size": COMMON["vocab_size"],
        "rotary_ndims": 2 * draw(st.integers(1, head_dim // 2)),
        **_experts(draw),
    }


def _experts(draw: st.DrawFn) -> dict[str, int]:
    number = draw(st.integers(2, 6))
    return {
        "num_experts": number,
        "experts_per_token": draw(st.integers(1, number)),
        "expert_width": draw(st.integers(1, 40)),
        "shared_expert_width": draw(st.integers(1, 40)),
    }


def _values(draw: st.DrawFn, entry: ConfigEntries, sizes: dict[str, Any]) -> dict[str, Any]:
    """Draw one entry."""
    for kind, draw_entry in DRAWN.items():
        if isinstance(entry, kind):
            return draw_entry(draw, entry, sizes)
    return {}


def _sized(draw: st.DrawFn, entry: Entry, sizes: dict[str, Any]) -> dict[str, Any]:
    return {entry.key: sizes[entry.field]} if entry.field in sizes else {}


def _window_pattern(draw: st.DrawFn, entry: WindowPattern, sizes: dict[str, Any]) -> dict[str, Any]:
    types = st.sampled_from(["full_attention", "sliding_attention"])
    blocks = sizes["num_layers"]
    return {"sliding_window": draw(WINDOWS), "layer_types": draw(st.lists(types, min_size=blocks, max_size=blocks))}


def _two_rotaries(draw: st.DrawFn, entry: TwoRotaries, sizes: dict[str, Any]) -> dict[str, Any]:
    full = _rotary(draw, Rotary(), sizes)["rope_parameters"]
    base = full["rope_theta"]
    if entry.local_key:
        base = float(draw(st.integers(100, 1_000_000)))
    local = {"rope_type": "default", "rope_theta": base}
    return {"rope_parameters": {"full_attention": full, "sliding_attention": local}}


def _rotary(draw: st.DrawFn, entry: Rotary, sizes: dict[str, Any]) -> dict[str, Any]:
    kinds = ["default", "linear", "llama3"] if entry.takes_scaling else ["default"]
    kind = draw(st.sampled_from(kinds))
    found: dict[str, Any] = {"rope_type": kind, "rope_theta": float(draw(st.integers(100, 1_000_000)))}
    if kind != "default":
        found["factor"] = draw(st.sampled_from([1.5, 4.0]))
    if kind == "llama3":
        found = {**SCALED, **found}
    if entry.fraction_key:
        head_dim = sizes["head_dim"]
        found["partial_rotary_factor"] = 2 * draw(st.integers(1, head_dim // 2)) / head_dim
    return {"rope_parameters": found}


def _one_of(values: Callable[[Any], st.SearchStrategy[Any]]) -> Callable[..., dict[str, Any]]:
    """Return a function that draws an entry from the strategy for it."""
    return lambda draw, entry, sizes: {entry.key: draw(values(entry))}


DRAWN: Mapping[type[ConfigEntries], Callable[..., dict[str, Any]]] = {
    Activation: _one_of(lambda entry: st.sampled_from([*entry.names.values()])),
    Rotary: _rotary,
    TwoRotaries: _two_rotaries,
    WindowPattern: _window_pattern,
    WindowInAllBlocks: lambda draw, entry, sizes: {"sliding_window": draw(st.none() | WINDOWS)},
    Bound: _one_of(lambda entry: st.none() | st.floats(0.5, 5.0)),
    ScoreDivisor: _one_of(lambda entry: st.integers(1, 300)),
    Factor: _one_of(lambda entry: st.sampled_from([0.1, 0.25, 1.0, 3.0, 12.0])),
    Choice: _one_of(lambda entry: st.sampled_from([*entry.values])),
    Switch: _one_of(lambda entry: st.booleans()),
    Entry: _sized,
}
"""Type of an entry -> function (draw, entry, sizes) that draws it; the first that fits."""
