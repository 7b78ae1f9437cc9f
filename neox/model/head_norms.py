"""Norms of queries and keys, by the three forms of `Architecture.qk_norm`.

Legend: B batch, S sequence, N heads here, D head dim.
"""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor, nn

from neox.architecture import NORMS, Architecture
from neox.parallel import (
    ParallelGrid,
    TensorOptions,
    copy_to_tensor_ranks,
    mark_decay,
    mark_split,
    reduce_over_tensor_ranks,
)

_EPSILON = torch.finfo(torch.float32).eps
"""Epsilon of norms of heads if the network's norm has none, as in torch."""


class HeadNorm(nn.Module):
    """RMSNorm or LayerNorm of heads: [B, S, N, D] -> the same shape.

    Args:
        shape: Shape of the parameters on this rank: (D,) if all heads share them, else (N * D,) or (N, D).
        grid: Process groups; heads are split over tensor ranks.
        all_heads: Whether the mean is over the dimensions of all heads together.
        centred: Whether it is a LayerNorm, with parameters `weight` and `bias`; otherwise RMSNorm, with `scale`.
        from_zero: Whether the factor is 1 + scale, with a scale that begins at 0.
        eps: Summand of the mean of the squares.
        **options: Device and type of the parameters.
    """

    weight: Tensor
    bias: Tensor
    scale: Tensor

    def __init__(
        self,
        shape: tuple[int, ...],
        grid: ParallelGrid,
        *,
        all_heads: bool = False,
        centred: bool = False,
        from_zero: bool = False,
        eps: float,
        **options: Unpack[TensorOptions],
    ) -> None:
        super().__init__()
        self.grid = grid
        self.all_heads = all_heads
        self.centred = centred
        self.from_zero = from_zero
        self.eps = eps
        self.shared = not all_heads and len(shape) == 1
        values = {"scale": 0.0 if from_zero else 1.0}
        if centred:
            values = {"weight": 1.0, "bias": 0.0}
        for name, value in values.items():
            parameter = nn.Parameter(torch.full(shape, value, **options))
            mark_split(parameter, not self.shared and grid.tp_size > 1)
            self.register_parameter(name, mark_decay(parameter, False))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise heads [B, S, N, D]."""
        x32 = x.float()
        if self.centred:
            x32 = x32 - self._mean(x32)
        normed = (x32 * torch.rsqrt(self._mean(x32.square()) + self.eps)).to(x.dtype)
        if self.centred:
            return normed * self._per_head(self.weight, x) + self._per_head(self.bias, x)
        factor = self._per_head(self.scale, x)
        if self.from_zero:
            factor = 1.0 + factor
        return normed * factor

    def _mean(self, x: Tensor) -> Tensor:
        """Return the mean that belongs to each element: [B, S, N, 1], or [B, S, 1, 1] over the heads of all ranks."""
        if not self.all_heads:
            return x.mean(-1, keepdim=True)
        total = reduce_over_tensor_ranks(x.sum((-2, -1), keepdim=True), self.grid)
        heads, width = x.shape[-2:]
        return copy_to_tensor_ranks(total, self.grid) / (heads * width * self.grid.tp_size)

    def _per_head(self, parameter: Tensor, x: Tensor) -> Tensor:
        """Return a parameter in the shape of heads; gradients of one that all ranks share are summed over them."""
        if self.shared:
            return copy_to_tensor_ranks(parameter, self.grid)
        return parameter.view(x.shape[-2:])


def query_key_norms(
    architecture: Architecture, grid: ParallelGrid, **options: Unpack[TensorOptions]
) -> dict[str, HeadNorm]:
    """Return the norm of queries and that of keys by name; one for both under gpt-neox's form, none without norms."""
    heads = architecture.num_attention_heads // grid.tp_size
    kv_heads = architecture.num_kv_heads // grid.tp_size
    width = architecture.head_dim
    eps = architecture.norm_epsilon or _EPSILON
    if architecture.qk_norm == "neox":
        centred = architecture.norm == "layernorm"
        return {"qk_layernorm": HeadNorm((heads, width), grid, all_heads=centred, centred=centred, eps=eps, **options)}
    if architecture.qk_norm == "head":
        from_zero = NORMS[architecture.norm].from_zero
        return {
            name: HeadNorm((width,), grid, from_zero=from_zero, eps=eps, **options) for name in ("q_norm", "k_norm")
        }
    if architecture.qk_norm == "full":
        sizes = {"q_norm": heads * width, "k_norm": kv_heads * width}
        return {name: HeadNorm((size,), grid, all_heads=True, eps=eps, **options) for name, size in sizes.items()}
    return {}
