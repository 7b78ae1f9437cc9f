"""Random `config.json` of any family, drawn entry by entry from its description in `neox.families`.

A new family needs nothing here. An entry of a new type needs a line in `_values`, or in `SPECIAL` if it is of one
family only; an entry that is unknown here keeps transformers' default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hypothesis import strategies as st

from neox.families import FAMILIES
from neox.families.config_entries import (
    Bound,
    Choice,
    ConfigEntries,
    Entry,
    Factor,
    ScoreDivisor,
    Switch,
)
from neox.families.phi3 import LongRotary
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
_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.7,
    "mscale_all_dim": 0.8,
}
_WITHOUT_MSCALE = {key: value for key, value in _YARN.items() if "mscale" not in key}


@st.composite
def deepseek(draw: st.DrawFn, best: int, unit: int, **others: st.SearchStrategy[Any]) -> dict[str, Any]:
    """Draw the widths of latent attention, multiples of `unit`, and groups of experts, of which `best` scores count."""
    groups = draw(st.integers(1, 3))
    size = draw(st.integers(best, 3))
    chosen = draw(st.integers(1, groups))
    blocks = draw(st.integers(1, 3))
    scaling = draw(st.sampled_from([{"rope_type": "default"}, _YARN, _WITHOUT_MSCALE]))
    return {
        "num_hidden_layers": blocks,
        "first_k_dense_replace": draw(st.integers(0, blocks - 1)),
        "num_key_value_heads": None,
        "kv_lora_rank": unit * draw(st.integers(4, 12)),
        "q_lora_rank": draw(st.none() | st.integers(4, 24)),
        "qk_rope_head_dim": 2 * draw(st.integers(1, 6)),
        "qk_nope_head_dim": unit * draw(st.integers(1, 6)),
        "v_head_dim": draw(st.integers(1, 16)),
        "rms_norm_eps": 1e-6,
        "n_routed_experts": max(2, groups * size),
        "n_shared_experts": draw(st.integers(1, 2)),
        "n_group": groups,
        "topk_group": chosen,
        "num_experts_per_tok": draw(st.integers(1, chosen * size)),
        "rope_parameters": {**scaling, "rope_theta": float(draw(st.integers(100, 1_000_000)))},
        **{key: draw(values) for key, values in others.items()},
    }


@st.composite
def mamba2(draw: st.DrawFn, heads: str, head_dim: str, groups: str, states: str, expand: str) -> dict[str, Any]:
    """Draw the sizes of Mamba-2's mixers, by their keys. The channels are a multiple of the hidden size."""
    number = draw(st.integers(1, 3))
    sizes = {groups: number, heads: number * draw(st.integers(1, 3)), head_dim: 4 * draw(st.integers(2, 4))}
    sizes |= {states: draw(st.integers(2, 12)), expand: draw(st.sampled_from([1, 2, 4]))}
    return {**sizes, "hidden_size": sizes[heads] * sizes[head_dim] // sizes[expand]}


@st.composite
def linear_attention(draw: st.DrawFn, **others: st.SearchStrategy[Any]) -> dict[str, Any]:
    """Draw the sizes of linear attention, and blocks of both kinds."""
    key_heads = draw(st.integers(1, 3))
    blocks = draw(st.permutations(["linear_attention", "full_attention", draw(st.sampled_from(["", *LAYER_KINDS]))]))
    types = [kind for kind in blocks if kind]
    return {
        "num_hidden_layers": len(types),
        "layer_types": types,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * draw(st.integers(1, 3)),
        # few dimensions turn rounding into differences
        "linear_key_head_dim": draw(st.integers(4, 16)),
        "linear_value_head_dim": draw(st.integers(4, 16)),
        "linear_conv_kernel_dim": draw(st.integers(2, 5)),
        **{key: draw(values) for key, values in others.items()},
    }


LAYER_KINDS = ("linear_attention", "full_attention")
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
    "deepseek_v3": deepseek(best=2, unit=1),
    # its rotary positions take rows of complex numbers, which no odd width divides
    "glm4_moe": st.integers(1, 3).flatmap(
        lambda groups: st.fixed_dictionaries(
            {
                "num_hidden_layers": st.integers(2, 3),
                "first_k_dense_replace": st.integers(0, 1),
                "n_routed_experts": st.integers(2, 3).map(lambda size: groups * size),
                "n_group": st.just(groups),
                "topk_group": st.integers(1, groups),
                "num_experts_per_tok": st.integers(1, 2),
                "n_shared_experts": st.integers(1, 2),
            }
        )
    ),
    "deepseek_v2": deepseek(best=1, unit=2, topk_method=st.sampled_from(["greedy", "group_limited_greedy"])),
    "mamba2": st.builds(
        lambda sizes, width, chunk: {**sizes, "conv_kernel": width, "chunk_size": chunk},
        mamba2("num_heads", "head_dim", "n_groups", "state_size", "expand"),
        st.integers(2, 5),
        st.integers(2, 40),
    ),
    "mamba": st.fixed_dictionaries(
        {
            "hidden_size": st.integers(8, 40),
            "expand": st.sampled_from([1, 2, 3]),
            "state_size": st.integers(2, 12),
            "conv_kernel": st.integers(2, 5),
            "time_step_rank": st.just("auto") | st.integers(1, 6),
        }
    ),
    "qwen3_next": linear_attention(mlp_only_layers=st.sampled_from([[], [0], [1]])),
    "qwen3_5_text": linear_attention(),
    "olmo_hybrid": linear_attention(),
    # without biases of their own, a tied head has none
    "gptj": st.just({"tie_word_embeddings": False}),
    "phi": st.just({"tie_word_embeddings": False}),
}
"""Family -> strategy of entries that only it has, or whose values depend on each other."""


@st.composite
def bamba(draw: st.DrawFn, sizes: dict[str, Any]) -> dict[str, Any]:
    """Draw which blocks of Bamba have attention, and the mixers of the others. There are some of both."""
    blocks = draw(st.integers(2, 4))
    hidden = sizes["num_attention_heads"] * 4 * draw(st.integers(2, 4))  # half of a head rotates
    rotary = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    heads = draw(st.sampled_from([number for number in (1, 2, 3) if 2 * hidden % number == 0]))
    groups = draw(st.sampled_from([number for number in (1, heads) if heads % number == 0]))
    found = {"mamba_n_heads": heads, "mamba_n_groups": groups, "mamba_d_state": draw(st.integers(2, 12))}
    numbers = draw(st.sets(st.integers(0, blocks - 1), min_size=1, max_size=blocks - 1))
    found |= {"num_hidden_layers": blocks, "hidden_size": hidden, "rope_parameters": rotary}
    return {**found, "attn_layer_indices": sorted(numbers), "mamba_chunk_size": draw(st.integers(2, 40))}


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
    if model_type == "bamba":
        found.update(draw(bamba(sizes)))
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


def _long_rotary(draw: st.DrawFn, entry: LongRotary, sizes: dict[str, Any]) -> dict[str, Any]:
    found = _rotary(draw, entry, sizes)
    if draw(st.booleans()):
        return found
    rope = found["rope_parameters"]
    frequencies = round(rope["partial_rotary_factor"] * sizes["head_dim"] / 2)
    factors = st.lists(st.floats(1.0, 9.0), min_size=frequencies, max_size=frequencies)
    rope |= {"rope_type": "longrope", "short_factor": draw(factors), "long_factor": draw(factors)}
    return {**found, "original_max_position_embeddings": draw(st.integers(14, sizes["max_positions"]))}


DRAWN: Mapping[type[ConfigEntries], Callable[..., dict[str, Any]]] = {
    Activation: _one_of(lambda entry: st.sampled_from([*entry.names.values()])),
    LongRotary: _long_rotary,
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
