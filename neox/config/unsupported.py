"""Keys of gpt-neox that are known by name and do not work here: each with the values that mean off, and the reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Unsupported:
    """One such key.

    off: values under which the feature is off, so that a file giving them loads. None (unset) always is.
    """

    off: tuple[Any, ...]
    reason: str


UNSUPPORTED: Mapping[str, Unsupported] = MappingProxyType(
    {
        "gpt_j_tied": Unsupported((False,), "is not implemented; use gpt_j_residual without it"),
        "synchronize_each_layer": Unsupported((False, True), ""),
        "partition_activations": Unsupported((False, True), ""),
    }
)
