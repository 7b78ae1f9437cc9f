"""Mistral (`MistralForCausalLM`): Llama without biases, its attention in a sliding window in version 0.1.

Source: transformers, models/mistral.
"""

from __future__ import annotations

from neox.families.family import Family
from neox.families.llama_like import BASE_PREFIX, BUFFERS, NETWORK, llama_entries, llama_tensors
from neox.families.shared_entries import WindowInAllBlocks, ending_entries

MISTRAL = Family(
    model_type="mistral",
    class_name="MistralForCausalLM",
    score_class="MistralForSequenceClassification",
    title="Mistral",
    fixed_fields=NETWORK,
    config=(
        *llama_entries(max_positions=131072, num_kv_heads=8),
        WindowInAllBlocks(default=4096),
        *ending_entries(),
    ),
    tensors=llama_tensors(),
    base_prefix=BASE_PREFIX,
    buffers=BUFFERS,
)
