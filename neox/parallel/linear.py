"""Linear layers split over tensor ranks: by output features (column) and by input features (row).

Legend: I input features, O output features. Weights are [O, I] as in `nn.Linear`, held as this rank's part;
constructors leave them uninitialised (`neox.model` draws all weights). `multiply` is
what multiplies: `F.linear`, or an equal of it. arXiv:1909.08053, section 3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from neox.architecture import ParameterSpec
from neox.parallel.collectives import copy_to_tensor_ranks, reduce_over_tensor_ranks
from neox.parallel.grid import ParallelGrid

Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(x [..., I], weight [O, I], bias [O] or None) -> [..., O]."""


def split_parameter(
    *shape: int, tp_size: int, device: torch.device | str | None, dtype: torch.dtype | None
) -> nn.Parameter:
    """Return an empty parameter of this rank's shape, marked `model_parallel` where it is one of several parts.

    DeepSpeed's gradient norm counts unmarked parameters on the first tensor rank only.
    """
    parameter = nn.Parameter(torch.empty(*shape, device=device, dtype=dtype))
    cast(Any, parameter).model_parallel = tp_size > 1
    return parameter


def shard_size(total: int, tp_size: int, what: str) -> int:
    """Return total / tp_size. Raises ValueError if it does not divide."""
    if total % tp_size:
        raise ValueError(f"{what} ({total}) is not divisible by the tensor-parallel degree ({tp_size})")
    return total // tp_size


def shard_range(spec: ParameterSpec, tp_rank: int, tp_size: int) -> tuple[int, int]:
    """Return (start, length) of a tensor rank's part along a split parameter's dimension. Raises ValueError."""
    assert spec.partition_dim is not None
    part = shard_size(spec.shape[spec.partition_dim], tp_size, spec.name)
    return tp_rank * part, part


def shard(full: Tensor, spec: ParameterSpec, tp_rank: int, tp_size: int) -> Tensor:
    """Return a tensor rank's part of a full parameter, as a view; replicated parameters are whole on every rank.

    Raises:
        ValueError: If the split dimension does not divide by `tp_size`.
    """
    if spec.partition_dim is None or tp_size == 1:
        return full
    return full.narrow(spec.partition_dim, *shard_range(spec, tp_rank, tp_size))


class ColumnParallelLinear(nn.Module):
    """y = x W^T + b with the outputs split: [..., I] replicated -> [..., O/tp]."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        grid: ParallelGrid,
        *,
        bias: bool = True,
        multiply: Multiply = F.linear,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.grid = grid
        self.multiply = multiply
        here = shard_size(out_features, grid.tp_size, "output features")
        self.weight = split_parameter(here, in_features, tp_size=grid.tp_size, device=device, dtype=dtype)
        self.bias = split_parameter(here, tp_size=grid.tp_size, device=device, dtype=dtype) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(copy_to_tensor_ranks(x, self.grid), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """y = x W^T + b with the inputs split: [..., I/tp] -> [..., O] replicated.

    There is one bias, replicated and added once after the sum over ranks. (gpt-neox holds one per tensor rank under
    `gpt_j_residual`, whose sum is the model's bias.)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        grid: ParallelGrid,
        *,
        bias: bool = True,
        multiply: Multiply = F.linear,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.grid = grid
        self.multiply = multiply
        here = shard_size(in_features, grid.tp_size, "input features")
        self.weight = split_parameter(out_features, here, tp_size=grid.tp_size, device=device, dtype=dtype)
        self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.grid.tp_size == 1:
            return self.multiply(x, self.weight, self.bias)
        y = reduce_over_tensor_ranks(self.partial(x), self.grid)
        return y if self.bias is None else y + self.bias

    def partial(self, x: Tensor) -> Tensor:
        """Return this rank's summand [..., O], without the bias: the caller adds several and reduces them together."""
        return self.multiply(x, self.weight, None)
