"""Causal attention by blocks of queries, each of which computes scores only with keys that it may see.

Nothing has the shape [S, S]: the largest tensors have the queries of one block and the keys that they see. The backward
pass computes the weights again, block by block.

Legend: B batch, S queries, T keys, N heads of queries, K of keys and values, G = N / K, D head dim, Q queries of a
block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from neox.architecture import MASKED_QUERY_BLOCK, MASKED_SCORES
from neox.ops.visible_pairs import VisiblePairs

# A block takes only its visible keys out of their range if they are at most this share of it.
_SPARSE = 0.75


def blocked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pairs: VisiblePairs,
    scale: float,
    *,
    dropout_p: float = 0.0,
    queries: Sequence[range] | None = None,
) -> Tensor:
    """Attend to visible keys: q [B, N, S, D], k and v [B, K, T, D] -> [B, N, S, D].

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        pairs: Which queries see which keys, of T tokens. Each query sees a key at least.
        scale: Factor of the scores.
        dropout_p: Dropout probability of the weights.
        queries: Indices of the queries among the keys, in runs of neighbours; all if None.
    """
    if queries is None:
        queries = (range(pairs.length),)
    seed = 0
    if dropout_p > 0.0:
        seed = int(torch.randint(2**62, ()))
    dtype = q.dtype
    if dtype == torch.float16:  # in which scores overflow
        q, k, v = (x.float() for x in (q, k, v))
    dropout = _Dropout(dropout_p, seed)
    out: Tensor = _BlockedAttention.apply(q, k, v, pairs, scale, dropout, queries)
    return out.to(dtype)


class _Dropout(NamedTuple):
    """Dropout whose masks are drawn again in the backward pass.

    Attributes:
        probability: Probability of dropping a weight.
        seed: What all masks of one call are drawn from.
    """

    probability: float
    seed: int

    def factors(self, weights: Tensor, number: int) -> Tensor | None:
        """Return what the weights of a block are multiplied by; None without dropout."""
        if self.probability == 0.0:
            return None
        generator = torch.Generator().manual_seed(self.seed + number)
        kept = torch.full_like(weights, 1.0 - self.probability).bernoulli_(generator=generator)
        return kept.div_(1.0 - self.probability)


class _Block(NamedTuple):
    """One block of queries and the keys that it looks at.

    Attributes:
        number: Number of the block among all of the call.
        heads: Index of the rows' heads of keys, among all B x K.
        queries: Index of the queries.
        keys: Index of the keys.
        unseen: Summand of the scores: 0, or -inf for pairs that are not visible, [G*Q, T] or [K, G*Q, T].
    """

    number: int
    heads: slice
    queries: slice
    keys: slice | Tensor
    unseen: Tensor


class _BlockedAttention(torch.autograd.Function):
    """Attention of queries [B, N, S, D] with keys and values [B, K, T, D], block by block in both passes."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        pairs: VisiblePairs,
        scale: float,
        dropout: _Dropout,
        queries: Sequence[range],
    ) -> Tensor:
        grouped, keys, values = _grouped(q, k, v)
        groups = grouped.shape[1]
        out = _empty_output(grouped, k.shape[0], v.shape[-1])
        for block in _blocks(grouped, k, pairs, queries):
            index = (block.heads, slice(None), block.queries)
            weights = _weights(grouped[index].flatten(1, 2), keys[block.heads, block.keys], block, scale)
            factors = dropout.factors(weights, block.number)
            if factors is not None:
                weights.mul_(factors)
            out[index] = torch.bmm(weights, values[block.heads, block.keys]).unflatten(1, (groups, -1))
        ctx.save_for_backward(q, k, v, out)
        ctx.arguments = (pairs, scale, dropout, queries)
        return out.reshape(*q.shape[:-1], v.shape[-1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out = ctx.saved_tensors
        pairs, scale, dropout, queries = ctx.arguments
        grouped, keys, values = _grouped(q, k, v)
        gradient = gradient.reshape(out.shape)
        groups = grouped.shape[1]
        of_q = torch.empty_like(grouped)
        of_k = torch.zeros_like(keys, dtype=torch.float32)
        of_v = torch.zeros_like(values, dtype=torch.float32)
        # The gradient of a row of weights is orthogonal to the row: this is what the softmax subtracts.
        projections = (gradient * out).sum(-1, keepdim=True, dtype=torch.float32).to(q.dtype)
        for block in _blocks(grouped, k, pairs, queries):
            index = (block.heads, slice(None), block.queries)
            part_q = grouped[index].flatten(1, 2)
            part_k = keys[block.heads, block.keys]
            part_gradient = gradient[index].flatten(1, 2)
            weights = _weights(part_q, part_k, block, scale)
            factors = dropout.factors(weights, block.number)
            dropped = weights if factors is None else weights * factors
            _add_product(of_v, block, dropped, part_gradient)
            part_v = values[block.heads, block.keys]
            of_scores = _score_gradient(weights, factors, part_gradient, part_v, projections[index].flatten(1, 2))
            of_scores.mul_(scale)
            of_q[index] = torch.bmm(of_scores, part_k).unflatten(1, (groups, -1))
            _add_product(of_k, block, of_scores, part_q)
            del block, weights, factors, dropped, of_scores  # before the scores of the next block
        return of_q.view_as(q), of_k.to(k.dtype).view_as(k), of_v.to(v.dtype).view_as(v), None, None, None, None


def _score_gradient(
    weights: Tensor, factors: Tensor | None, gradient: Tensor, values: Tensor, projections: Tensor
) -> Tensor:
    """Return the gradient of the scaled scores [heads, G*Q, T].

    Args:
        weights: Attention weights [heads, G*Q, T].
        factors: Dropout factors of the weights; None without dropout.
        gradient: Gradient of the output [heads, G*Q, D].
        values: Values [heads, T, D].
        projections: Row sums of output x gradient, which the softmax's gradient subtracts [heads, G*Q, 1].
    """
    if factors is None:
        weight_gradient = torch.baddbmm(projections, gradient, values.transpose(1, 2), beta=-1)
    else:
        weight_gradient = torch.bmm(gradient, values.transpose(1, 2)).mul_(factors).sub_(projections)
    return weight_gradient.mul_(weights)


def _weights(q: Tensor, k: Tensor, block: _Block, scale: float) -> Tensor:
    """Return the weights of a block [heads, G*Q, T] for queries [heads, G*Q, D] and keys [heads, T, D]."""
    return torch.baddbmm(block.unseen, q, k.transpose(1, 2), alpha=scale).softmax(-1)


def _grouped(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries [B*K, G, S, D], keys [B*K, T, D] and values [B*K, T, D]."""
    batch, heads, length, dim = q.shape
    kv_heads = k.shape[1]
    grouped = q.reshape(batch * kv_heads, heads // kv_heads, length, dim)
    return grouped, k.flatten(0, 1), v.flatten(0, 1)


def _empty_output(grouped: Tensor, batch: int, dim: int) -> Tensor:
    """Return an empty tensor [B*K, G, S, D] for the output.

    For one sample, the heads of a token are adjacent in memory, so the output projection needs no copy.
    """
    rows, groups, length, _ = grouped.shape
    if batch > 1:
        return grouped.new_empty((rows, groups, length, dim))
    return grouped.new_empty((length, rows, groups, dim)).permute(1, 2, 0, 3)


def _blocks(grouped: Tensor, k: Tensor, pairs: VisiblePairs, queries: Sequence[range]) -> Iterator[_Block]:
    """Yield the blocks of all rows. Rows with the same pairs share blocks, up to a maximum number of scores.

    Args:
        grouped: Queries [B*K, G, S, D].
        k: Keys [B, K, T, D].
        pairs: Which queries see which keys.
        queries: Indices of the queries among the keys, in runs of neighbours.
    """
    rows_of_heads, groups, _, _ = grouped.shape
    kv_heads = k.shape[1]
    number = 0
    separate = pairs.rows > 1 or pairs.rule_heads > 1
    together = kv_heads if separate else rows_of_heads
    for row in range(k.shape[0] if separate else 1):
        described_row = row if pairs.rows > 1 else 0
        for part, neighbours in _query_blocks(queries):
            keys, seen = _visible_keys(pairs, described_row, neighbours.start, neighbours.stop)
            unseen = torch.zeros(seen.shape, dtype=grouped.dtype, device=seen.device).masked_fill_(
                ~seen, -math.inf
            )  # [N or 1, Q, T]
            if pairs.rule_heads > 1:
                unseen = unseen.view(kv_heads, groups * len(neighbours), -1)
            else:
                unseen = unseen.squeeze(0).repeat(groups, 1)
            at_once = max(1, MASKED_SCORES // (groups * len(neighbours) * seen.shape[-1]))
            for first in range(0, together, at_once):
                last = min(first + at_once, together)
                heads = slice(row * together + first, row * together + last)
                of_heads = unseen[first:last] if pairs.rule_heads > 1 else unseen
                yield _Block(number, heads, part, keys, of_heads)
                number += 1


def _query_blocks(queries: Sequence[range]) -> Iterator[tuple[slice, range]]:
    """Yield the queries of each block: their positions among all queries, and their indices among the keys."""
    place = 0
    for run in queries:
        for start in range(run.start, run.stop, MASKED_QUERY_BLOCK):
            neighbours = range(start, min(start + MASKED_QUERY_BLOCK, run.stop))
            yield slice(place, place + len(neighbours)), neighbours
            place += len(neighbours)


def _visible_keys(pairs: VisiblePairs, row: int, start: int, end: int) -> tuple[slice | Tensor, Tensor]:
    """Return the keys that the queries [start, end) look at, and which of them each sees, bool [N or 1, Q, T]."""
    first = pairs.first_key(row, start, end)
    keys = torch.arange(first, end, device=pairs.device)
    queries = torch.arange(start, end, device=pairs.device)
    seen = pairs.part(torch.tensor([row], device=pairs.device), queries, keys).squeeze(0)
    if pairs.rule is None or pairs.reach is not None:  # visible keys are neighbours
        return slice(first, end), seen
    visible = seen.any(dim=(0, 1))
    if int(visible.sum()) > _SPARSE * (end - first):
        return slice(first, end), seen
    return keys[visible], seen[..., visible]


def _add_product(total: Tensor, block: _Block, left: Tensor, right: Tensor) -> None:
    """Add left^T [heads, T, G*Q] times right [heads, G*Q, D] to the block's keys in a sum [B*K, T, D] in fp32."""
    left = left.transpose(1, 2)
    if isinstance(block.keys, Tensor):
        total[block.heads].index_add_(1, block.keys, torch.bmm(left, right).float())
        return
    part = total[block.heads, block.keys]
    if right.dtype == torch.float32:
        part.baddbmm_(left, right)
    else:
        part.add_(torch.bmm(left, right))
