"""Keys of older gpt-neox that stand for values of several other keys."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from neox.config.flat import FlatKeys
from neox.config.gated_widths import llama_width
from neox.config.keys import NEOX_KEYS, UNSUPPORTED_IN_BLOCKS
from neox.config.sections.deepspeed import ZeroSettings

_LATER_SIZES = ("expansion_factor", "mlp_multiple_of")  # keys that came when `mlp_type` went
_OLDER_EXPERTS = frozenset(key for key, row in NEOX_KEYS.items() if row.section == "experts" and row.removed)
_GATED: Mapping[str, str] = MappingProxyType(
    {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu_tanh", "relu": "reglu"}
)
"""Activation of one half of a gated MLP -> its name here."""


def convert_older_keys(keys: FlatKeys) -> None:
    """Set what keys of older gpt-neox and DeepSpeed stand for. What contradicts them is a problem."""
    _convert_deepspeed_blocks(keys)
    if keys.values.get("mlp_type") == "llama" and not holds_converted_mlp(keys.values):
        _convert_llama_mlp(keys)
    if _OLDER_EXPERTS & keys.values.keys() and not {"expert_interval", "moe_expert_interval"} & keys.values.keys():
        keys.values["moe_expert_interval"] = 2  # the default until May 2025
        keys.sources.setdefault("moe_expert_interval", keys.source(min(_OLDER_EXPERTS & keys.values.keys())))
    if keys.values.get("use_bnb_optimizer") is True:
        _convert_bitsandbytes(keys)


def _convert_deepspeed_blocks(keys: FlatKeys) -> None:
    """Replace DeepSpeed's older forms: a block named `bfloat16`, and `zero_optimization: true` for stage 1."""
    if "bfloat16" in keys.values:
        if "bf16" in keys.values:
            keys.report("`bfloat16` is the old name of `bf16`, which is given, too; remove one", "bfloat16", "bf16")
        keys.values.setdefault("bf16", keys.values.pop("bfloat16"))
        keys.sources.setdefault("bf16", keys.source("bfloat16"))
    if isinstance(keys.values.get("zero_optimization"), bool):
        keys.values["zero_optimization"] = {"stage": int(keys.values["zero_optimization"])}
    _name_stage3_settings(keys)


def _name_stage3_settings(keys: FlatKeys) -> None:
    """Give settings of ZeRO 3 that are named as in DeepSpeed's class the names of its documentation."""
    block = keys.values.get("zero_optimization")
    if not isinstance(block, Mapping):
        return
    known = {*ZeroSettings.model_fields, *(path.rpartition(".")[2] for path in UNSUPPORTED_IN_BLOCKS)}
    renamed: dict[str, Any] = {}
    for key, value in block.items():
        name = f"stage3_{key}" if f"stage3_{key}" in known else key
        if name != key and name in block:
            path = f"zero_optimization.{key}"
            keys.report(f"`{path}` is another name of `{name}`, which is given, too; remove one", path)
        renamed[name] = value
        if f"zero_optimization.{key}" in keys.sources:
            keys.sources.setdefault(f"zero_optimization.{name}", keys.sources[f"zero_optimization.{key}"])
    keys.values["zero_optimization"] = renamed


def holds_converted_mlp(values: Mapping[str, Any]) -> bool:
    """Return whether `mlp_type: llama` has been converted before, as in the config.yml of a checkpoint.

    Then the other keys say all, and an absent one had its default: checkpoints until November 2026 may have biases.
    """
    is_llama = values.get("mlp_type") == "llama" and "mlp_width" in values
    return is_llama and values.get("activation") in _GATED.values()


def _convert_llama_mlp(keys: FlatKeys) -> None:
    """Set what gpt-neox's `LLaMAParallelMLP` (May 2023 to September 2024) was: a gated MLP without biases.

    It took `intermediate_size` (since February 2024) as the width itself. In a gated MLP of later versions the key is
    three times the width.
    """
    values = keys.values
    for name in _LATER_SIZES:
        if name in values:
            message = f"`mlp_type: llama` is older than `{name}`: remove one of them, or give only `mlp_width`"
            keys.report(message, "mlp_type", name)
    activation = values.get("activation", "gelu")
    values["activation"] = _GATED.get(activation, activation)
    if values["activation"] not in _GATED.values():
        keys.report(
            f"`mlp_type: llama` has no form with `activation: {activation}`; use silu", "mlp_type", "activation"
        )
    if values.setdefault("use_bias_in_mlp", False) is not False:
        message = "`mlp_type: llama` has no biases; remove `use_bias_in_mlp`, or mlp_type"
        keys.report(message, "use_bias_in_mlp", "mlp_type")
    _set_llama_width(keys)
    for name in ("activation", "mlp_width", "use_bias_in_mlp"):
        keys.sources.setdefault(name, keys.source("mlp_type"))


def _set_llama_width(keys: FlatKeys) -> None:
    """Set `mlp_width`, if it is not given, to `intermediate_size`, or to 8/3 of the hidden size in multiples of 256."""
    values = keys.values
    hidden = values.get("hidden_size")
    if "intermediate_size" in values:
        width = values.pop("intermediate_size")
        keys.sources.setdefault("mlp_width", keys.source("intermediate_size"))
        if values.setdefault("mlp_width", width) != width:
            message = (
                f"`mlp_width: {values['mlp_width']}` contradicts `intermediate_size: {width}`, which means the same"
            )
            keys.report(f"{message} with `mlp_type: llama`; remove one", "mlp_width", "intermediate_size", "mlp_type")
    elif isinstance(hidden, int) and hidden > 0:
        values.setdefault("mlp_width", llama_width(hidden))


def _convert_bitsandbytes(keys: FlatKeys) -> None:
    """Replace Adam by its form with states in 8 bits."""
    block: Any = keys.values.get("optimizer", {})
    if not isinstance(block, Mapping):
        return
    kind = str(block.get("type", "Adam"))
    if kind.lower() not in ("adam", "adamw", "adam8bit"):
        message = f"`use_bnb_optimizer: true` is for Adam, not for `optimizer.type: {kind}`; remove one"
        keys.report(message, "use_bnb_optimizer", "optimizer.type")
    keys.values["optimizer"] = {**block, "type": "Adam8bit"}
