"""Mistral (`MistralForCausalLM`): Llama without biases, its attention in a sliding window in version 0.1.

Source: transformers, models/mistral.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from neox.architecture import Architecture
from neox.families.llama_like import llama_like, window_fields


def _fields(hf: Mapping[str, Any]) -> dict[str, Any]:
    return window_fields(hf["num_hidden_layers"], hf["sliding_window"])


def _entries(architecture: Architecture) -> dict[str, Any]:
    return {"sliding_window": architecture.window or None}


MISTRAL = llama_like(
    model_type="mistral",
    class_name="MistralForCausalLM",
    title="Mistral",
    fields=_fields,
    entries=_entries,
    defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
)
