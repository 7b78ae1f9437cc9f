"""Weights laid out for reading: on CPUs, matrices in the blocked order in which oneDNN multiplies.

A weight that is trained lies in rows; oneDNN reads it in blocks and would rearrange it at every product. Weights that
only generate are rearranged once. Measured on one core of an AMD EPYC, against rows: products of one token are then 1.3
to 1.6 times as fast in fp32 and 1.7 to 2.5 times in bf16, of eight tokens 1.2 to 2 times. They are moved to huge pages,
from which large ones are read as fast as memory allows; a product costs about 25 microseconds beside that.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from neox.generation.huge_pages import use_huge_pages
from neox.ops.linear import ONEDNN
from neox.parallel import ColumnParallelLinear, RowParallelLinear

_EXPECTED_ROWS = 16
"""Rows of activations that the layout is chosen for. For 1, oneDNN chooses one that is a third slower in fp32."""


class PackedWeight:
    """A weight [O, I] in oneDNN's layout; called like `F.linear`, whose weight argument it ignores."""

    def __init__(self, weight: Tensor) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _EXPECTED_ROWS)
        if hasattr(torch.ops.mkldnn, "data_ptr"):  # not in every torch
            use_huge_pages(torch.ops.mkldnn.data_ptr(self.packed), weight.nbytes)
        self.multiply = torch.ops.mkldnn._linear_pointwise.default  # finding the overload takes microseconds

    def __call__(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return self.multiply(x, self.packed, bias, "none", [], "")


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies such weights on this machine."""
    if device.type != "cpu" or not ONEDNN:
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack_layers(layers: Iterable[nn.Module]) -> None:
    """Rearrange the weights of all split linear layers inside `layers`, in place: the rows are given up."""
    for layer in layers:
        for module in layer.modules():
            if isinstance(module, ColumnParallelLinear | RowParallelLinear):
                module.multiply = PackedWeight(module.weight)
                module.register_parameter("weight", None)
