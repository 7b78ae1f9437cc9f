"""Communication of tensor ranks with its gradient. For one tensor rank, each function does nothing.

They use torch's functional collectives, which change no argument. torch.compile traces them, so that a compiled block
is one graph with several tensor ranks, too.

Legend: B batch, S sequence, H hidden, V vocabulary, T tensor ranks. To divide tokens [B, S, ...], their rows are put
one after another and cut into T equal runs. Each rank's share is one run, in the shape [B, S/T, ...]. So joining shares
moves nothing in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed._functional_collectives  # registers shapes for torch.compile
from torch import Tensor

from neox.parallel.grid import ParallelGrid

_ops = torch.ops._c10d_functional


def copy_to_tensor_ranks(x: Tensor, grid: ParallelGrid) -> Tensor:
    """Pass a replicated tensor into split computation: identity forward, gradients summed over tensor ranks."""
    return _exchanged(x, grid, _same, all_reduce)


def reduce_over_tensor_ranks(x: Tensor, grid: ParallelGrid) -> Tensor:
    """Sum partial results over tensor ranks; the gradient passes through."""
    return _exchanged(x, grid, all_reduce, _same)


def scatter_last_dim(x: Tensor, grid: ParallelGrid) -> Tensor:
    """Take this rank's part of a replicated tensor's last dim [..., H] -> [..., H/T]; gradients are gathered."""
    return _exchanged(x, grid, _own_part, _all_gather)


def gather_last_dim(x: Tensor, grid: ParallelGrid) -> Tensor:
    """Join the last dim over tensor ranks [..., V/T] -> [..., V]; each rank's gradient is its own part."""
    return _exchanged(x, grid, _all_gather, _own_part)


def reduce_scatter_last_dim(x: Tensor, grid: ParallelGrid) -> Tensor:
    """Sum partial results [..., V] over tensor ranks and keep this rank's part [..., V/T]; gradients are gathered.

    An all-reduce and a slice: a reduce-scatter would need the parts one after another in memory.
    """
    return _exchanged(x, grid, _reduced_part, _all_gather)


def scatter_tokens(x: Tensor, grid: ParallelGrid) -> Tensor:
    """Take this rank's share of replicated tokens [B, S, ...] -> [B, S/T, ...]; gradients are gathered."""
    return _exchanged(x, grid, _own_share, all_shares)


def gather_tokens(x: Tensor, grid: ParallelGrid) -> Tensor:
    """Join the shares of all ranks [B, S/T, ...] -> [B, S, ...]; each rank's gradient is its own share."""
    return _exchanged(x, grid, all_shares, _own_share)


def copy_tokens_to_tensor_ranks(x: Tensor, grid: ParallelGrid) -> Tensor:
    """Pass shares [B, S/T, ...] into split computation of all tokens [B, S, ...]; gradients are summed and divided."""
    return _exchanged(x, grid, all_shares, _reduced_share)


def reduce_scatter_tokens(x: Tensor, grid: ParallelGrid) -> Tensor:
    """Sum partial results [B, S, ...] over tensor ranks and keep a share [B, S/T, ...]; gradients are gathered."""
    return _exchanged(x, grid, _reduced_share, all_shares)


def gather_tensor_ranks(x: Tensor, grid: ParallelGrid) -> Tensor:
    """Return x of all tensor ranks, [T, *x.shape]; no gradient passes."""
    return wait(start_gather(x, grid)).view(grid.tp_size, *x.shape)


def start_sum(x: Tensor, grid: ParallelGrid) -> Tensor:
    """Begin to sum x over tensor ranks; `wait` returns the result. No gradient passes."""
    return _ops.all_reduce(x.contiguous(), "sum", grid.tp_name)


def start_gather(x: Tensor, grid: ParallelGrid) -> Tensor:
    """Begin to join x of all tensor ranks along the first dim; `wait` returns the result. No gradient passes."""
    return _ops.all_gather_into_tensor(x.contiguous(), grid.tp_size, grid.tp_name)


def start_scattered_sum(x: Tensor, grid: ParallelGrid) -> Tensor:
    """Begin to sum x over tensor ranks; each gets a part of the first dim, which `wait` returns. No gradient passes."""
    return _ops.reduce_scatter_tensor(x.contiguous(), "sum", grid.tp_size, grid.tp_name)


def wait(x: Tensor) -> Tensor:
    """Return the result of a collective that has begun. On a GPU the stream waits, and the caller continues."""
    return _ops.wait_tensor(x)


Exchange = Callable[[Tensor, ParallelGrid], Tensor]
"""A function of all ranks of a group."""


def exchange(x: Tensor, grid: ParallelGrid, forward: Exchange, backward: Exchange) -> Tensor:
    """Return an exchange of x. Another exchange turns the gradient of the result into that of x."""
    exchanged: Tensor = _WithGradient.apply(x, grid, forward, backward)
    return exchanged


def _same(x: Tensor, grid: ParallelGrid) -> Tensor:
    return x.view_as(x)


def all_reduce(x: Tensor, grid: ParallelGrid) -> Tensor:
    """Return x summed over tensor ranks; no gradient passes."""
    return wait(start_sum(x, grid))


def _own_part(x: Tensor, grid: ParallelGrid) -> Tensor:
    return x.chunk(grid.tp_size, dim=-1)[grid.tp_rank].contiguous()


def _all_gather(x: Tensor, grid: ParallelGrid) -> Tensor:
    return torch.cat(gather_tensor_ranks(x, grid).unbind(0), dim=-1)


def _reduced_part(x: Tensor, grid: ParallelGrid) -> Tensor:
    return _own_part(all_reduce(x, grid), grid)


def _by_shares(x: Tensor, grid: ParallelGrid) -> Tensor:
    """View tokens [B, S, ...] as the shares of all ranks, [T B, S/T, ...]."""
    return x.reshape(x.shape[0] * grid.tp_size, x.shape[1] // grid.tp_size, *x.shape[2:])


def _own_share(x: Tensor, grid: ParallelGrid) -> Tensor:
    # A copy, so that the other shares are released.
    return _by_shares(x, grid).chunk(grid.tp_size)[grid.tp_rank].clone()


def all_shares(x: Tensor, grid: ParallelGrid) -> Tensor:
    """Join the shares of all ranks [B, S/T, ...] -> [B, S, ...]; no gradient passes."""
    return wait(start_gather(x, grid)).view(x.shape[0], x.shape[1] * grid.tp_size, *x.shape[2:])


def _reduced_share(x: Tensor, grid: ParallelGrid) -> Tensor:
    return wait(start_scattered_sum(_by_shares(x, grid), grid))


def _exchanged(x: Tensor, grid: ParallelGrid, forward: Exchange, backward: Exchange) -> Tensor:
    """Return an exchange between tensor ranks with its gradient; x itself if there is one."""
    if grid.tp_size == 1:
        return x
    return exchange(x, grid, forward, backward)


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, grid: ParallelGrid, forward: Exchange, backward: Exchange) -> Tensor:
        ctx.grid = grid
        ctx.exchange = backward
        return forward(x, grid)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.exchange(grad, ctx.grid), None, None, None
