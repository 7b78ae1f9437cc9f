"""Tensor-group communication with its gradient: each function does nothing for one tensor rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from neox.parallel.grid import ParallelGrid


def copy_to_tensor_ranks(x: Tensor, grid: ParallelGrid) -> Tensor:
    """Pass a replicated tensor into split computation: identity forward, gradients summed over tensor ranks."""
    return x if grid.tp_size == 1 else _Copy.apply(x, grid)


def reduce_over_tensor_ranks(x: Tensor, grid: ParallelGrid) -> Tensor:
    """Sum partial results over tensor ranks; the gradient passes through. May write into `x`."""
    return x if grid.tp_size == 1 else _Reduce.apply(x, grid)


def scatter_last_dim(x: Tensor, grid: ParallelGrid) -> Tensor:
    """Take this rank's part of a replicated tensor's last dim [..., H] -> [..., H/tp]; gradients are gathered."""
    return x if grid.tp_size == 1 else _Scatter.apply(x, grid)


def gather_last_dim(x: Tensor, grid: ParallelGrid) -> Tensor:
    """Join the last dim over tensor ranks [..., V/tp] -> [..., V]; each rank's gradient is its own part."""
    return x if grid.tp_size == 1 else _Gather.apply(x, grid)


def reduce_scatter_last_dim(x: Tensor, grid: ParallelGrid) -> Tensor:
    """Sum partial results [..., V] over tensor ranks and keep this rank's part [..., V/tp]; gradients are gathered.

    An all-reduce and a slice: gloo knows no reduce-scatter. May write into `x`.
    """
    return x if grid.tp_size == 1 else _ReduceScatter.apply(x, grid)


def gather_tensor_ranks(x: Tensor, grid: ParallelGrid) -> Tensor:
    """Return x of all tensor ranks, [T, *x.shape]; no gradient passes."""
    return torch.stack(_parts(x, grid))


def _all_reduce(x: Tensor, grid: ParallelGrid) -> Tensor:
    x = x.contiguous()
    dist.all_reduce(x, group=grid.tp_group)
    return x


def _own_part(x: Tensor, grid: ParallelGrid) -> Tensor:
    return x.chunk(grid.tp_size, dim=-1)[grid.tp_rank].contiguous()


def _all_gather(x: Tensor, grid: ParallelGrid) -> Tensor:
    return torch.cat(_parts(x, grid), dim=-1)


def _parts(x: Tensor, grid: ParallelGrid) -> list[Tensor]:
    x = x.contiguous()
    parts = [torch.empty_like(x) for _ in range(grid.tp_size)]
    dist.all_gather(parts, x, group=grid.tp_group)
    return parts


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, grid: ParallelGrid) -> Tensor:
        ctx.grid = grid
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # A copy: autograd may hand the same gradient tensor to another branch.
        return _all_reduce(grad.clone(memory_format=torch.contiguous_format), ctx.grid), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, grid: ParallelGrid) -> Tensor:
        if not x.is_contiguous():
            return _all_reduce(x, grid)
        ctx.mark_dirty(x)
        return _all_reduce(x, grid)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, grid: ParallelGrid) -> Tensor:
        ctx.grid = grid
        return _own_part(x, grid)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_gather(grad, ctx.grid), None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, grid: ParallelGrid) -> Tensor:
        ctx.grid = grid
        return _all_gather(x, grid)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _own_part(grad, ctx.grid), None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, grid: ParallelGrid) -> Tensor:
        ctx.grid = grid
        return _own_part(_all_reduce(x.clone(), grid), grid)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_gather(grad, ctx.grid), None
