"""Tensor-group communication with its gradient: each function does nothing for one tensor rank.

torch's functional collectives, which write into no argument: torch.compile traces them, so that a compiled block is one
graph with tensor ranks too.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed._functional_collectives  # registers shapes for torch.compile
from torch import Tensor

from neox.parallel.grid import ParallelGrid

_ops = torch.ops._c10d_functional


def copy_to_tensor_ranks(x: Tensor, grid: ParallelGrid) -> Tensor:
    """Pass a replicated tensor into split computation: identity forward, gradients summed over tensor ranks."""
    return x if grid.tp_size == 1 else _Copy.apply(x, grid)


def reduce_over_tensor_ranks(x: Tensor, grid: ParallelGrid) -> Tensor:
    """Sum partial results over tensor ranks; the gradient passes through."""
    return x if grid.tp_size == 1 else _Reduce.apply(x, grid)


def scatter_last_dim(x: Tensor, grid: ParallelGrid) -> Tensor:
    """Take this rank's part of a replicated tensor's last dim [..., H] -> [..., H/tp]; gradients are gathered."""
    return x if grid.tp_size == 1 else _Scatter.apply(x, grid)


def gather_last_dim(x: Tensor, grid: ParallelGrid) -> Tensor:
    """Join the last dim over tensor ranks [..., V/tp] -> [..., V]; each rank's gradient is its own part."""
    return x if grid.tp_size == 1 else _Gather.apply(x, grid)


def reduce_scatter_last_dim(x: Tensor, grid: ParallelGrid) -> Tensor:
    """Sum partial results [..., V] over tensor ranks and keep this rank's part [..., V/tp]; gradients are gathered.

    An all-reduce and a slice: a reduce-scatter would need the parts one after another in memory.
    """
    return x if grid.tp_size == 1 else _ReduceScatter.apply(x, grid)


def gather_tensor_ranks(x: Tensor, grid: ParallelGrid) -> Tensor:
    """Return x of all tensor ranks, [T, *x.shape]; no gradient passes."""
    gathered = _ops.all_gather_into_tensor(x.contiguous(), grid.tp_size, grid.tp_name)
    return wait(gathered).view(grid.tp_size, *x.shape)


def start_sum(x: Tensor, grid: ParallelGrid) -> Tensor:
    """Begin to sum x over tensor ranks; `wait` returns the result. No gradient passes."""
    return _ops.all_reduce(x.contiguous(), "sum", grid.tp_name)


def wait(x: Tensor) -> Tensor:
    """Return the result of a collective that has begun; on a GPU the stream waits, not the caller."""
    return _ops.wait_tensor(x)


def _all_reduce(x: Tensor, grid: ParallelGrid) -> Tensor:
    return wait(start_sum(x, grid))


def _own_part(x: Tensor, grid: ParallelGrid) -> Tensor:
    return x.chunk(grid.tp_size, dim=-1)[grid.tp_rank].contiguous()


def _all_gather(x: Tensor, grid: ParallelGrid) -> Tensor:
    return torch.cat(gather_tensor_ranks(x, grid).unbind(0), dim=-1)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, grid: ParallelGrid) -> Tensor:
        ctx.grid = grid
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(grad, ctx.grid), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, grid: ParallelGrid) -> Tensor:
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
        return _own_part(_all_reduce(x, grid), grid)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_gather(grad, ctx.grid), None
