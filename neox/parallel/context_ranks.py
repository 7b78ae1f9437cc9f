"""Context parallelism: ranks that divide the tokens of each sample, and what they exchange in attention.

The tokens of a sample are cut into 2C neighbouring parts for C context ranks. Rank r has part r and part 2C - 1 - r, so
that each rank has as many pairs of causal attention to compute. With C = 2 and eight tokens:

    token         0 1 2 3 4 5 6 7
    context rank  0 0 1 1 1 1 0 0

Keys and values are gathered (`all_gather`, as in Llama 3, arXiv:2407.21783), or tokens are exchanged for heads
(`ulysses`, DeepSpeed-Ulysses, arXiv:2309.14509).

Legend: B batch, S sequence, C context ranks, N heads, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from neox.parallel.collectives import exchange, wait
from neox.parallel.grid import ParallelGrid

_ops = torch.ops._c10d_functional


def context_ranges(length: int, grid: ParallelGrid) -> tuple[range, range]:
    """Return the indices of this rank's two parts in a sample of `length` tokens."""
    ranks = grid.cp_size
    width = length // (2 * ranks)
    early = grid.cp_rank * width
    late = (2 * ranks - 1 - grid.cp_rank) * width
    return range(early, early + width), range(late, late + width)


def context_indices(length: int, grid: ParallelGrid, device: torch.device | None = None) -> Tensor:
    """Return the indices of this rank's tokens in a sample of `length` tokens, [S/C]."""
    early, late = context_ranges(length, grid)
    parts = [torch.arange(part.start, part.stop, device=device) for part in (early, late)]
    return torch.cat(parts)  # a tensor of Python numbers would be copied from the host, which waits


def gather_context(x: Tensor, grid: ParallelGrid) -> Tensor:
    """Join the tokens of all context ranks in order [B, S/C, ...] -> [B, S, ...]; gradients are summed and divided."""
    return exchange(x, grid, _gathered, _summed_part)


def join_context(x: Tensor, grid: ParallelGrid) -> Tensor:
    """Join the tokens of all context ranks in order [B, S/C, ...] -> [B, S, ...]; no gradient passes."""
    if x.dtype is torch.bool:
        return _gathered(x.byte(), grid).bool()
    return _gathered(x.detach(), grid)


def own_context(x: Tensor, grid: ParallelGrid) -> Tensor:
    """Return this rank's tokens of whole samples [B, S, ...] -> [B, S/C, ...]."""
    return x[:, context_indices(x.shape[1], grid, x.device)]


def sum_over_context_ranks(x: Tensor, grid: ParallelGrid) -> Tensor:
    """Return x summed over context ranks; no gradient passes."""
    return wait(_ops.all_reduce(x.detach().contiguous(), "sum", grid.cp_name))


def total_of_context_ranks(x: Tensor, grid: ParallelGrid) -> Tensor:
    """Sum x over context ranks, each of which computes the same loss of the sum; x itself if there is one.

    x is part of the losses of all C ranks, so its gradient is C times that of one of them. The mean over ranks that
    engines take divides by C again.
    """
    if grid.cp_size == 1:
        return x
    return exchange(x, grid, sum_over_context_ranks, _times_ranks)


def tokens_to_heads(x: Tensor, grid: ParallelGrid) -> Tensor:
    """Exchange all heads of this rank's tokens for all tokens of some heads: [B, S/C, N, D] -> [B, S, N/C, D]."""
    return exchange(x, grid, _all_tokens, _all_heads)


def heads_to_tokens(x: Tensor, grid: ParallelGrid) -> Tensor:
    """Exchange all tokens of some heads for all heads of this rank's tokens: [B, S, N/C, D] -> [B, S/C, N, D]."""
    return exchange(x, grid, _all_heads, _all_tokens)


def _in_order(parts: Tensor) -> Tensor:
    """Put the tokens of all ranks in order: [C, B, S/C, ...] -> [B, S, ...]."""
    ranks, batch, tokens = parts.shape[:3]
    halves = parts.unflatten(2, (2, tokens // 2))  # [C, B, 2, S/2C, ...]
    early = halves[:, :, 0]
    late = halves[:, :, 1].flip(0)
    return torch.cat((early, late)).transpose(0, 1).reshape(batch, ranks * tokens, *parts.shape[3:])


def _by_rank(x: Tensor, ranks: int) -> Tensor:
    """Undo `_in_order`: [B, S, ...] -> [C, B, S/C, ...]."""
    parts = x.unflatten(1, (2 * ranks, -1)).transpose(0, 1)  # [2C, B, S/2C, ...]
    early = parts[:ranks]
    late = parts[ranks:].flip(0)
    return torch.cat((early, late), dim=2)


def _times_ranks(x: Tensor, grid: ParallelGrid) -> Tensor:
    return x * grid.cp_size


def _gathered(x: Tensor, grid: ParallelGrid) -> Tensor:
    parts = _ops.all_gather_into_tensor(x.contiguous(), grid.cp_size, grid.cp_name)
    return _in_order(wait(parts).view(grid.cp_size, *x.shape))


def _summed_part(x: Tensor, grid: ParallelGrid) -> Tensor:
    parts = _by_rank(x, grid.cp_size)
    summed = _ops.reduce_scatter_tensor(parts.flatten(0, 1).contiguous(), "sum", grid.cp_size, grid.cp_name)
    return wait(summed).view(parts.shape[1:])


def _all_tokens(x: Tensor, grid: ParallelGrid) -> Tensor:
    """Return all tokens of this rank's heads: [B, S/C, N, D] -> [B, S, N/C, D]."""
    sent = x.unflatten(2, (grid.cp_size, -1)).permute(2, 0, 1, 3, 4)  # [C, B, S/C, N/C, D]
    return _in_order(_exchanged(sent, grid))


def _all_heads(x: Tensor, grid: ParallelGrid) -> Tensor:
    """Return all heads of this rank's tokens: [B, S, N/C, D] -> [B, S/C, N, D]."""
    received = _exchanged(_by_rank(x, grid.cp_size), grid)  # [C, B, S/C, N/C, D]
    return received.permute(1, 2, 0, 3, 4).flatten(2, 3)


def _exchanged(sent: Tensor, grid: ParallelGrid) -> Tensor:
    """Send the part [i] of a tensor [C, ...] to context rank i, and return the parts that came from all."""
    rows = [1] * grid.cp_size
    received = _ops.all_to_all_single(sent.contiguous(), rows, rows, grid.cp_name)
    return wait(received).view(sent.shape)
