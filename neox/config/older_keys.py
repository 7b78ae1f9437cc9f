"""Keys of older gpt-neox that stand for values of several other keys."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from neox.config.flat import FlatKeys

_MLP_SIZES = ("intermediate_size", "expansion_factor", "mlp_multiple_of")
_LLAMA_MULTIPLE = 256
_GATED: Mapping[str, str] = MappingProxyType(
    {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu_tanh", "relu": "reglu"}
)
"""Activation of one half of a gated MLP -> its name here."""


def convert_older_keys(keys: FlatKeys) -> None:
    """Set what `mlp_type: llama` and `use_bnb_optimizer` stand for. What contradicts them is a problem."""
    if keys.values.get("mlp_type") == "llama":
        _convert_llama_mlp(keys)
    if keys.values.get("use_bnb_optimizer") is True:
        _convert_bitsandbytes(keys)


def _convert_llama_mlp(keys: FlatKeys) -> None:
    """Set activation and width of gpt-neox's older `LLaMAParallelMLP`."""
    values = keys.values
    for name in _MLP_SIZES:
        if name in values:
            keys.report(f"`mlp_type: llama` sets the width of the MLP; remove `{name}` or mlp_type", "mlp_type", name)
    activation = values.get("activation", "gelu")
    values["activation"] = _GATED.get(activation, activation)
    if values["activation"] not in _GATED.values():
        keys.report(
            f"`mlp_type: llama` has no form with `activation: {activation}`; use silu", "mlp_type", "activation"
        )
    hidden = values.get("hidden_size")
    if isinstance(hidden, int) and hidden > 0:
        multiples = -(-int(2 * hidden * 4 / 3) // _LLAMA_MULTIPLE)
        width = values.setdefault("mlp_width", multiples * _LLAMA_MULTIPLE)
        if width != multiples * _LLAMA_MULTIPLE:
            expected = multiples * _LLAMA_MULTIPLE
            keys.report(f"`mlp_width: {width}` contradicts `mlp_type: llama`, which is {expected} wide", "mlp_width")
    for name in ("activation", "mlp_width"):
        keys.sources.setdefault(name, keys.source("mlp_type"))


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
