"""Models that see or hear around a text network: `config.json` nests the network's own, and its tensors have a prefix.

    Gemma 3 (Google's files)    text_config    language_model.model.layers.0. ...    vision_tower. ...
    Gemma 3 (transformers 5)    text_config    model.language_model.layers.0. ...    model.vision_tower. ...
    Qwen3.5                     text_config    model.language_model.layers.0. ...    model.visual. ...    mtp. ...

The text network is read as `AutoModelForCausalLM` does, which takes `text_config` (`configuration_utils`,
`get_text_config`) and renames tensors (transformers 5.24, `conversion_mapping.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config")
_OF_BOTH = (
    "dtype",
    "torch_dtype",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "quantization_config",
    "num_labels",
    "id2label",
)
"""Entries that the outer configuration gives for all of its networks, unless the inner one has them."""
_DEFAULT_TYPES: Mapping[str, str] = MappingProxyType({"gemma3": "gemma3_text", "qwen3_5": "qwen3_5_text"})
"""Outer `model_type` -> that of a `text_config` without one, as in transformers' classes."""
_TEXT_PREFIXES = ("model.language_model.model.", "model.language_model.", "language_model.model.")
_HEAD = re.compile(r"^(?:model\.)?language_model\.(lm_head\..+)$")


def text_network(hf: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the `config.json` of the text network inside of another model's; None if there is none."""
    key = next((key for key in _TEXT_CONFIGS if isinstance(hf.get(key), Mapping)), None)
    if key is None:
        return None
    inner = dict(hf[key])
    if inner.get("model_type") is None and hf.get("model_type") in _DEFAULT_TYPES:
        inner["model_type"] = _DEFAULT_TYPES[hf["model_type"]]
    for name in _OF_BOTH:
        if inner.get(name) is None and hf.get(name) is not None:
            inner[name] = hf[name]
    return inner


def text_key(stored: str, base_prefix: str) -> str | None:
    """Return the key of a tensor in the text network's own files; None if the stored key has no mark of a wrapper.

    Args:
        stored: Key in the files.
        base_prefix: Prefix of the family's keys.
    """
    if found := _HEAD.match(stored):
        return found[1]
    for prefix in _TEXT_PREFIXES:
        if stored.startswith(prefix):
            return base_prefix + stored.removeprefix(prefix)
    return None
