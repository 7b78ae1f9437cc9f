"""Llama (`LlamaForCausalLM`): Llama 2, 3, 3.1, 3.2, and the many models that have its form.

Source: transformers, models/llama.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from neox.architecture import Architecture
from neox.families.llama_like import llama_like


def _fields(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "qkv_bias": hf["attention_bias"],
        "attention_output_bias": hf["attention_bias"],
        "mlp_bias": hf["mlp_bias"],
        # transformers refuses another width, whatever the heads are
        "hidden_size": hf["hidden_size"] // hf["num_attention_heads"] * hf["num_attention_heads"],
    }


def _entries(architecture: Architecture) -> dict[str, Any]:
    return {"attention_bias": architecture.qkv_bias, "mlp_bias": architecture.mlp_bias}


LLAMA = llama_like(
    model_type="llama",
    class_name="LlamaForCausalLM",
    title="Llama",
    fields=_fields,
    entries=_entries,
    defaults={"attention_bias": False, "mlp_bias": False},
)
