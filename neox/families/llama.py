"""Llama (`LlamaForCausalLM`): Llama 2, 3, 3.1, 3.2, and the many models that have its form.

Source: transformers, models/llama.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from neox.families.entries import ALL_GLOBAL, ATTENTION_BIASES_EQUAL, ConfigEntries, Fields, Switch
from neox.families.family import Family
from neox.families.llama_like import BASE_PREFIX, BUFFERS, NETWORK, llama_entries, llama_tensors
from neox.families.shared_entries import ending_entries


class _HeadsDivideHidden(ConfigEntries):
    """The hidden size, which transformers requires to be a multiple of the number of heads, whatever their width."""

    def problems(self, hf: Mapping[str, Any]) -> Iterator[str]:
        """Yield a reason if it is not."""
        hidden = hf.get("hidden_size")
        heads = hf.get("num_attention_heads")
        if isinstance(hidden, int) and isinstance(heads, int) and heads > 0 and hidden % heads:
            yield f"hidden_size: {hidden}: should be a multiple of num_attention_heads: {heads}"

    def read(self, hf: Mapping[str, Any], known: Fields) -> Fields:
        """Return the largest hidden size that transformers accepts."""
        heads = known["num_attention_heads"]
        return {"hidden_size": known["hidden_size"] // heads * heads}


LLAMA = Family(
    model_type="llama",
    class_name="LlamaForCausalLM",
    title="Llama",
    network=NETWORK,
    config=(
        *llama_entries(),
        _HeadsDivideHidden(),
        ALL_GLOBAL,
        Switch("attention_bias", "qkv_bias", False),
        ATTENTION_BIASES_EQUAL,
        Switch("mlp_bias", "mlp_bias", False),
        *ending_entries(),
    ),
    tensors=llama_tensors(),
    base_prefix=BASE_PREFIX,
    buffers=BUFFERS,
)
