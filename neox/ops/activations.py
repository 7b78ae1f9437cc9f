"""MLP activations by name. Input: what the MLP's first product makes, `width_factor` times as wide as the output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch.nn.functional as F
from torch import Tensor


def gelu(x: Tensor) -> Tensor:
    """Return x Phi(x) with the exact (erf) normal distribution (arXiv:1606.08415)."""
    return F.gelu(x)


def gelu_tanh(x: Tensor) -> Tensor:
    """Return the tanh approximation of `gelu`: NeoX's `bias_gelu_fusion`, Hugging Face's `gelu_fast`."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType({"gelu": gelu, "gelu_tanh": gelu_tanh})
