"""Tokens in chunks, as the parallel forms of recurrences take them.

Legend: B batch, S sequence, c chunks, L tokens of a chunk, N heads, W their width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def in_chunks(x: Tensor, chunk: int) -> Tensor:
    """Divide tokens into chunks, with zeros at the end of the last one: [B, S, ...] -> [B, c, L, ...].

    Args:
        x: The tensor.
        chunk: Tokens of a chunk, L.
    """
    missing = -x.shape[1] % chunk
    if missing:
        x = F.pad(x, (0, 0) * (x.ndim - 2) + (0, missing))
    return x.unflatten(1, (-1, chunk))


def heads_in_chunks(x: Tensor, chunk: int) -> Tensor:
    """Divide tokens of heads into chunks, as `in_chunks`: [B, S, N, W] -> [B, N, c, L, W]."""
    return in_chunks(x, chunk).movedim(3, 1)


def starts_in_chunks(starts: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """Divide the starts of documents into chunks, and say which documents began before their chunk.

    What is missing at the end belongs to the last document.

    Args:
        starts: Index in the row at which each token's document starts, [B, S].
        chunk: Tokens of a chunk, L.

    Returns:
        The starts [B, c, L], and whether each lies before its chunk, bool [B, c, L].
    """
    missing = -starts.shape[1] % chunk
    starts = torch.cat((starts, starts[:, -1:].expand(-1, missing)), dim=1).unflatten(1, (-1, chunk))
    first = torch.arange(0, starts.shape[1] * chunk, chunk, device=starts.device).unsqueeze(-1)  # of each chunk, [c, 1]
    return starts, starts < first


class StateScan(torch.autograd.Function):
    """States S' = a S + B of one chunk after another.

    Autograd's own backward pass of a loop makes a tensor of all chunks for each chunk that the loop reads.
    """

    @staticmethod
    def forward(ctx: Any, kept: Tensor, added: Tensor, state: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        """Return the states before each chunk, with the shape of B, and the last one.

        Args:
            ctx: Context.
            kept: a, with the shape of B or 1 in some of its last dimensions.
            added: B.
            state: The first state, with the shape of B without the dimension of chunks.
            dim: Dimension of chunks in `kept` and `added`.
        """
        before = torch.empty_like(added)
        for here, a, b in zip(before.unbind(dim), kept.unbind(dim), added.unbind(dim), strict=True):
            here.copy_(state)
            state = torch.addcmul(b, a, here)
        ctx.save_for_backward(kept, before)
        ctx.dim = dim
        return before, state

    @staticmethod
    def backward(ctx: Any, of_before: Tensor, of_last: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Return the gradients, from the last chunk to the first."""
        kept, before = ctx.saved_tensors
        dim = ctx.dim
        of_added = torch.empty_like(before)
        of_state = of_last
        for chunk in reversed(range(before.shape[dim])):
            here = of_added.select(dim, chunk)
            here.copy_(of_state)
            of_state = torch.addcmul(of_before.select(dim, chunk), kept.select(dim, chunk), here)
        return (of_added * before).sum_to_size(kept.shape), of_added, of_state, None
