"""SmolLM3 (`SmolLM3ForCausalLM`): Llama that rotates nothing in some blocks, which may have a window.

Source: transformers, models/smollm3.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from neox.architecture import Architecture
from neox.families.config_entries import (
    ATTENTION_BIASES_EQUAL,
    ConfigEntries,
    Fields,
    ModelSettings,
    Size,
    Switch,
    Written,
)
from neox.families.family import Family
from neox.families.llama_like import BASE_PREFIX, BUFFERS, NETWORK, llama_entries, llama_tensors
from neox.families.shared_entries import (
    LAYER_TYPES,
    Rotary,
    ending_entries,
    layer_types,
    layer_types_problems,
    windowed_blocks,
)


class _BlocksWithoutRotary(ConfigEntries):
    """`no_rope_layers`, a list with 1 for each block that rotates and 0 for others; or else each so-many-th block."""

    _EVERY = Size("no_rope_layer_interval", "every", 4)

    def problems(self, hf: Mapping[str, Any]) -> Iterator[str]:
        """Yield a reason for each of the two entries that is wrong."""
        yield from self._EVERY.problems(hf)
        rotated = hf.get("no_rope_layers")
        if rotated is None:
            return
        if not isinstance(rotated, list) or any(type(item) is not int or item not in (0, 1) for item in rotated):
            yield f"no_rope_layers: {rotated!r}: should be a list of 0 and 1"
        elif len(rotated) != hf.get("num_hidden_layers"):
            yield f"no_rope_layers: has {len(rotated)} entries for num_hidden_layers: {hf.get('num_hidden_layers')}"

    def read(self, hf: Mapping[str, Any], known: Fields) -> Fields:
        """Return the numbers of the blocks."""
        rotated = hf.get("no_rope_layers")
        if rotated is None:
            every = hf.get("no_rope_layer_interval", 4)
            rotated = [int((block + 1) % every != 0) for block in range(known["num_layers"])]
        return {"unrotated_blocks": tuple(block for block, item in enumerate(rotated) if item == 0)}

    def write(self, network: Architecture, settings: ModelSettings) -> Mapping[str, Any]:
        """Return the list."""
        return {"no_rope_layers": [int(block not in network.unrotated_blocks) for block in range(network.num_layers)]}


class _Windows(ConfigEntries):
    """Attention of each block: `layer_types`, or else a window in blocks that rotate nothing, if it is used."""

    def problems(self, hf: Mapping[str, Any]) -> Iterator[str]:
        """Yield a reason for each of the three entries that is wrong."""
        yield from Switch("use_sliding_window", "used", default=False).problems(hf)
        yield from Size("sliding_window", "window", None, null=None).problems(hf)
        yield from layer_types_problems(hf)

    def read(self, hf: Mapping[str, Any], known: Fields) -> Fields:
        """Return the attention of all blocks and the window."""
        window = None
        if hf.get("use_sliding_window", False):
            window = hf.get("sliding_window")
        types = hf.get("layer_types")
        if types is None:
            windowed = [block in known["unrotated_blocks"] for block in range(known["num_layers"])]
        else:
            windowed = [kind == LAYER_TYPES["sliding_window"] for kind in types]
        return windowed_blocks(window, windowed)

    def write(self, network: Architecture, settings: ModelSettings) -> Mapping[str, Any]:
        """Return the three entries."""
        return {
            "use_sliding_window": network.window > 0,
            "sliding_window": network.window or None,
            "layer_types": layer_types(network),
        }


SMOLLM3 = Family(
    model_type="smollm3",
    class_name="SmolLM3ForCausalLM",
    score_class="SmolLM3ForSequenceClassification",
    title="SmolLM3",
    fixed_fields=NETWORK,
    config=(
        *llama_entries(max_positions=32768, num_kv_heads=4, rotary=Rotary(default_base=2000000.0), tied=True),
        _BlocksWithoutRotary(),
        _Windows(),
        Switch("attention_bias", "qkv_bias", default=False),
        ATTENTION_BIASES_EQUAL,
        Switch("mlp_bias", "mlp_bias", default=False),
        # its default in transformers, 128004, would keep the embedding of that token from being trained there
        Written("pad_token_id", None),
        *ending_entries(),
    ),
    tensors=llama_tensors(),
    base_prefix=BASE_PREFIX,
    buffers=BUFFERS,
)
