"""Activations of MLPs on paper, by their names in the YAML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Activation:
    """An MLP activation.

    Attributes:
        width_factor: Width of its input as a multiple of its output: 2 if one half gates the other.
    """

    width_factor: int = 1


_PLAIN = ("gelu", "gelu_tanh", "relu", "softsign", "swish", "silu", "mish")
_GATED = ("geglu", "geglu_tanh", "swiglu", "reglu", "glu", "bilinear", "clamped_swiglu")
ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {**dict.fromkeys(_PLAIN, Activation()), **dict.fromkeys(_GATED, Activation(width_factor=2))}
)
