"""Weights in the layout that oneDNN reads fastest on a CPU, for models whose weights no longer change.

Products of a few rows, as in generation, read each weight once. This layout saves oneDNN from rearranging it each time.
"""

from __future__ import annotations

import torch
from torch import Tensor

_EXPECTED_ROWS = 16
"""Rows of activations that the layout is chosen for. For one row, oneDNN's choice is a third slower in fp32."""


class PackedWeight:
    """A weight [O, I] in oneDNN's layout; called like `F.linear`, whose weight argument it ignores."""

    def __init__(self, weight: Tensor) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _EXPECTED_ROWS)
        self._multiply = torch.ops.mkldnn._linear_pointwise.default  # finding the overload takes microseconds

    def __call__(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Return x W^T + b: x [..., I] -> [..., O]."""
        return self._multiply(x, self._packed, bias, "none", [], "")


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether oneDNN multiplies packed weights of this type on this machine."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())
