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
        kept: What the backward pass of torch's operations needs, its input and output among them, as a multiple of its
            output. A compiler computes again what it can, and keeps input and output.
    """

    width_factor: int = 1
    kept: int = 2


_PLAIN = ("gelu", "gelu_tanh", "swish", "silu", "mish")
_GATED = ("geglu", "geglu_tanh", "swiglu", "reglu", "glu")
ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {
        **dict.fromkeys(_PLAIN, Activation()),
        "relu": Activation(kept=1),  # its output says where it is 0
        "softsign": Activation(kept=3),
        **dict.fromkeys(_GATED, Activation(width_factor=2, kept=4)),
        "bilinear": Activation(width_factor=2, kept=3),
        "clamped_swiglu": Activation(width_factor=2, kept=7),
    }
)
