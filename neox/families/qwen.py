"""Qwen2 and Qwen3 (`Qwen2ForCausalLM`, `Qwen3ForCausalLM`): Qwen2, Qwen2.5, Qwen3, without mixtures of experts.

Source: transformers, models/qwen2 and models/qwen3. Qwen2 has biases of queries, keys and values only; Qwen3 instead
normalises the queries and keys of each head. Some blocks may have a sliding window.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from neox.architecture import Architecture
from neox.families.llama_like import llama_like, window_fields

_DEFAULTS = MappingProxyType(
    {"max_position_embeddings": 32768, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
)
_KINDS = MappingProxyType({"global": "full_attention", "sliding_window": "sliding_attention"})


def _window(hf: Mapping[str, Any]) -> dict[str, Any]:
    kinds, first = hf.get("layer_types"), hf["max_window_layers"]
    window = hf["sliding_window"] if hf["use_sliding_window"] else None
    return window_fields(
        hf["num_hidden_layers"], window, lambda i: kinds[i] == "sliding_attention" if kinds else i >= first
    )


def _entries(architecture: Architecture) -> dict[str, Any]:
    kinds = [_KINDS.get(kind, "full_attention") for kind in architecture.attention]
    return {
        "use_sliding_window": architecture.window > 0,
        "sliding_window": architecture.window or None,
        "max_window_layers": next((i for i, kind in enumerate(kinds) if kind != "full_attention"), len(kinds)),
        "layer_types": kinds,
    }


def _qwen2_fields(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {"qkv_bias": True, **_window(hf)}


def _qwen3_fields(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "qkv_bias": hf["attention_bias"],
        "attention_output_bias": hf["attention_bias"],
        "qk_norm": "head",
        **_window(hf),
    }


QWEN2 = replace(
    llama_like(
        model_type="qwen2",
        class_name="Qwen2ForCausalLM",
        title="Qwen2",
        fields=_qwen2_fields,
        entries=_entries,
        defaults=_DEFAULTS,
    ),
    tokenizer_pattern=r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+",
)

QWEN3 = llama_like(
    model_type="qwen3",
    class_name="Qwen3ForCausalLM",
    title="Qwen3",
    fields=_qwen3_fields,
    entries=lambda architecture: {**_entries(architecture), "attention_bias": architecture.qkv_bias},
    defaults={**_DEFAULTS, "head_dim": 128, "attention_bias": False},
    modules={"attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"},
)
