"""Llama (`LlamaForCausalLM`): Llama 2, 3, 3.1, 3.2, and models with the same architecture.

Source: transformers, models/llama.
"""

from __future__ import annotations

from neox.families.config_entries import ALL_GLOBAL, ATTENTION_BIASES_EQUAL, Switch
from neox.families.family import Family
from neox.families.llama_like import BASE_PREFIX, BUFFERS, NETWORK, llama_entries, llama_tensors
from neox.families.shared_entries import HeadsDivideHidden, ending_entries

LLAMA = Family(
    model_type="llama",
    class_name="LlamaForCausalLM",
    score_class="LlamaForSequenceClassification",
    title="Llama",
    fixed_fields=NETWORK,
    config=(
        *llama_entries(),
        HeadsDivideHidden(),
        ALL_GLOBAL,
        Switch("attention_bias", "qkv_bias", default=False),
        ATTENTION_BIASES_EQUAL,
        Switch("mlp_bias", "mlp_bias", default=False),
        *ending_entries(),
    ),
    tensors=llama_tensors(),
    base_prefix=BASE_PREFIX,
    buffers=BUFFERS,
)
