"""OLMo-2 (`Olmo2ForCausalLM`): Llama with norms of the results of attention and MLP, and of all queries and all keys.

Source: transformers, models/olmo2.
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
        "qk_norm": "full",
        "residual": "sublayer_output_norm",
    }


def _entries(architecture: Architecture) -> dict[str, Any]:
    # its default, 1, would keep the embedding of that token from being trained in transformers
    return {"attention_bias": architecture.qkv_bias, "pad_token_id": None}


OLMO2 = llama_like(
    model_type="olmo2",
    class_name="Olmo2ForCausalLM",
    title="OLMo-2",
    fields=_fields,
    entries=_entries,
    defaults={"attention_bias": False, "rms_norm_eps": 1e-5},
    modules={
        "attention.q_norm": "self_attn.q_norm",
        "attention.k_norm": "self_attn.k_norm",
        "post_feedforward_layernorm": "post_feedforward_layernorm",
    },
)
