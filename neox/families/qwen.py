"""Qwen2 and Qwen3 (`Qwen2ForCausalLM`, `Qwen3ForCausalLM`): Qwen2, Qwen2.5, Qwen3, without mixtures of experts.

Source: transformers, models/qwen2 and models/qwen3. Qwen2 has biases of queries, keys and values only. Qwen3 instead
normalises the queries and keys of each head. Some blocks may have a sliding window.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from neox.architecture import Architecture
from neox.families.config_entries import (
    ATTENTION_BIASES_EQUAL,
    ConfigEntries,
    Count,
    Fields,
    ModelSettings,
    Size,
    Switch,
)
from neox.families.family import Family
from neox.families.llama_like import BASE_PREFIX, BUFFERS, NETWORK, NORMS_OF_HEADS, llama_entries, llama_tensors
from neox.families.shared_entries import (
    LAYER_TYPES,
    ending_entries,
    layer_types,
    layer_types_problems,
    windowed_blocks,
)

_FULL, _SLIDING = LAYER_TYPES["global"], LAYER_TYPES["sliding_window"]


class _Windows(ConfigEntries):
    """Attention of each block: `layer_types`, or else a window from block `max_window_layers` on, if it is used."""

    _USED = Switch("use_sliding_window", "used", default=False)
    _WINDOW = Size("sliding_window", "window", 4096, null=None)
    _FIRST = Count("max_window_layers", "first", 28)

    def problems(self, hf: Mapping[str, Any]) -> Iterator[str]:
        """Yield a reason for each of the four entries that is wrong."""
        for entry in (self._USED, self._WINDOW, self._FIRST):
            yield from entry.problems(hf)
        yield from layer_types_problems(hf)

    def read(self, hf: Mapping[str, Any], known: Fields) -> Fields:
        """Return the attention of all blocks and the window."""
        first = self._FIRST.read(hf, known)["first"]
        types = hf.get("layer_types")
        if types is None:
            types = [_FULL if block < first else _SLIDING for block in range(known["num_layers"])]
        window = None
        if self._USED.read(hf, known)["used"]:
            window = self._WINDOW.read(hf, known)["window"]
        return windowed_blocks(window, [kind == _SLIDING for kind in types])

    def write(self, network: Architecture, settings: ModelSettings) -> Mapping[str, Any]:
        """Return the four entries."""
        types = layer_types(network)
        return {
            "use_sliding_window": network.window > 0,
            "sliding_window": network.window or None,
            "max_window_layers": types.index(_SLIDING) if _SLIDING in types else len(types),
            "layer_types": types,
        }


QWEN2 = Family(
    model_type="qwen2",
    class_name="Qwen2ForCausalLM",
    score_class="Qwen2ForSequenceClassification",
    title="Qwen2",
    fixed_fields={**NETWORK, "qkv_bias": True},
    config=(
        *llama_entries(max_positions=32768),
        _Windows(),
        *ending_entries(),
    ),
    tensors=llama_tensors(),
    base_prefix=BASE_PREFIX,
    buffers=BUFFERS,
    tokenizer_pattern=r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+",
)

QWEN3 = Family(
    model_type="qwen3",
    class_name="Qwen3ForCausalLM",
    score_class="Qwen3ForSequenceClassification",
    title="Qwen3",
    fixed_fields={**NETWORK, "qk_norm": "head"},
    config=(
        *llama_entries(max_positions=32768, head_dim=128),
        _Windows(),
        Switch("attention_bias", "qkv_bias", default=False),
        ATTENTION_BIASES_EQUAL,
        *ending_entries(),
    ),
    tensors=llama_tensors(NORMS_OF_HEADS),
    base_prefix=BASE_PREFIX,
    buffers=BUFFERS,
)
