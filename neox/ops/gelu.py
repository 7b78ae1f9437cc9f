"""The two GELUs of NeoX (arXiv:1606.08415). A bias is cheapest in the matmul before."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def gelu(x: Tensor) -> Tensor:
    """x Phi(x) with the exact (erf) normal distribution: NeoX's `activation: gelu`."""
    return F.gelu(x)


def gelu_tanh(x: Tensor) -> Tensor:
    """The tanh approximation: what NeoX computes under `bias_gelu_fusion`, Hugging Face's `gelu_fast`."""
    return F.gelu(x, approximate="tanh")


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """gelu_tanh(x + bias), for callers whose bias is not in a matmul."""
    return gelu_tanh(x + bias)
