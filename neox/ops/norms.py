"""Norms by name: modules over the last dimension whose parameters are those of `neox.architecture.NORMS`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from torch import nn

NORMS: Mapping[str, Callable[..., nn.Module]] = MappingProxyType({"layernorm": nn.LayerNorm})
"""Name -> constructor (hidden size, eps=, device=, dtype=)."""
