"""MLP activations by name. The input is the first product's result, `width_factor` times as wide as the output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor


def gelu(x: Tensor) -> Tensor:
    """Return x Phi(x) with the exact (erf) normal distribution (arXiv:1606.08415)."""
    return F.gelu(x)


def gelu_tanh(x: Tensor) -> Tensor:
    """Return the tanh approximation of `gelu`: NeoX's `bias_gelu_fusion`, Hugging Face's `gelu_fast`."""
    return F.gelu(x, approximate="tanh")


def identity(x: Tensor) -> Tensor:
    """Return x."""
    return x


def gated(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return the activation [..., 2W] -> [..., W] that multiplies the first half by `activation` of the second.

    Gated linear units, arXiv:2002.05202; the order of the halves is gpt-neox's.
    """

    def apply(x: Tensor) -> Tensor:
        value, gate = x.chunk(2, dim=-1)
        return activation(gate) * value

    return apply


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "gelu": gelu,
        "gelu_tanh": gelu_tanh,
        "relu": F.relu,
        "softsign": F.softsign,
        "swish": F.silu,
        "silu": F.silu,
        "mish": F.mish,
        "geglu": gated(gelu),
        "geglu_tanh": gated(gelu_tanh),
        "swiglu": gated(F.silu),
        "reglu": gated(F.relu),
        "glu": gated(torch.sigmoid),
        "bilinear": gated(identity),
    }
)
