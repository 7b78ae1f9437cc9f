"""Qwen2-MoE and Qwen3-MoE (`Qwen2MoeForCausalLM`, `Qwen3MoeForCausalLM`): Qwen with experts in some or all blocks.

Source: transformers, models/qwen2_moe and models/qwen3_moe. Qwen2-MoE has a shared expert with a gate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from neox.families.config_entries import ALL_GLOBAL, ATTENTION_BIASES_EQUAL, Fixed, Switch
from neox.families.expert_entries import (
    QWEN_EXPERTS,
    SHARED_EXPERT,
    SOFTMAX_EXPERTS,
    ExpertSize,
    qwen_expert_entries,
    with_equal_heads,
)
from neox.families.family import Family
from neox.families.llama_like import BASE_PREFIX, BUFFERS, NETWORK, llama_entries, llama_tensors
from neox.families.qwen import QWEN2
from neox.families.shared_entries import LAYER_TYPES, ending_entries


class _NoWindows(Fixed):
    """`use_sliding_window`, which must be off, and `layer_types`, which may only name full attention."""

    def problems(self, hf: Mapping[str, Any]) -> Iterator[str]:
        """Yield a reason for each of the two entries that names a window."""
        yield from super().problems(hf)
        types = hf.get("layer_types")
        if types is not None and types != [LAYER_TYPES["global"]] * len(types):
            yield f"layer_types: {types!r}: only {LAYER_TYPES['global']} is supported"


_TENSORS = llama_tensors()
_NORMED = llama_tensors({"attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"})

QWEN2_MOE = Family(
    model_type="qwen2_moe",
    class_name="Qwen2MoeForCausalLM",
    score_class="Qwen2MoeForSequenceClassification",
    title="Qwen2-MoE",
    fixed_fields={**NETWORK, **SOFTMAX_EXPERTS, "shared_expert_gate": True},
    config=(
        *with_equal_heads(llama_entries(max_positions=32768)),
        ALL_GLOBAL,
        _NoWindows("use_sliding_window", False),
        Switch("qkv_bias", "qkv_bias", default=True),
        *qwen_expert_entries(number=60, per_token=4, width=1408, normalizes=False),
        ExpertSize("shared_expert_intermediate_size", "shared_expert_width", 5632),
        *ending_entries(),
    ),
    tensors={**_TENSORS, "block": {**_TENSORS["block"], **QWEN_EXPERTS, **SHARED_EXPERT}},
    base_prefix=BASE_PREFIX,
    buffers=BUFFERS,
    tokenizer_pattern=QWEN2.tokenizer_pattern,
)

QWEN3_MOE = Family(
    model_type="qwen3_moe",
    class_name="Qwen3MoeForCausalLM",
    score_class="Qwen3MoeForSequenceClassification",
    title="Qwen3-MoE",
    fixed_fields={**NETWORK, **SOFTMAX_EXPERTS, "qk_norm": "head"},
    config=(
        *llama_entries(max_positions=32768, num_kv_heads=4),
        ALL_GLOBAL,
        _NoWindows("use_sliding_window", False),
        Switch("attention_bias", "qkv_bias", default=False),
        ATTENTION_BIASES_EQUAL,
        *qwen_expert_entries(number=128, per_token=8, width=768, normalizes=False),
        *ending_entries(),
    ),
    tensors={**_NORMED, "block": {**_NORMED["block"], **QWEN_EXPERTS}},
    base_prefix=BASE_PREFIX,
    buffers=BUFFERS,
)
