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


_SLOPE = 1.702
_LIMIT = 7.0


def clamped_swiglu(x: Tensor) -> Tensor:
    """Return g sigmoid(1.702 g) (v + 1) for [..., 2W] -> [..., W], with v clamped to [-7, 7] and g to at most 7.

    gpt-oss, arXiv:2508.10925.
    """
    value, gate = x.chunk(2, dim=-1)
    value = value.clamp(-_LIMIT, _LIMIT)
    gate = gate.clamp(max=_LIMIT)
    return gate * torch.sigmoid(gate * _SLOPE) * (value + 1)


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
        "clamped_swiglu": clamped_swiglu,
    }
)
