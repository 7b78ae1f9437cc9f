"""Causal attention on GPUs by blocks of visible pairs, with torch's FlexAttention (arXiv:2412.05496).

It is compiled. Blocks without a visible pair are not computed, and nothing has the shape [S, S]. It has no dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from neox.ops.visible_pairs import VisiblePairs


def block_mask_of(pairs: VisiblePairs, queries: Sequence[range] | None = None) -> BlockMask:
    """Return the blocks of pairs to compute, of 128 queries and 128 keys each, for all rows.

    Args:
        pairs: Which queries see which keys.
        queries: Indices of the queries among the keys, as ranges; all of the row if None.
    """
    make: Callable[..., BlockMask] = create_block_mask
    if pairs.device.type != "cpu":
        make = compiled_block_mask()
    return block_mask_by(make, pairs, queries)


def block_mask_by(
    make: Callable[..., BlockMask], pairs: VisiblePairs, queries: Sequence[range] | None = None
) -> BlockMask:
    """Return what `block_mask_of` does, made by `create_block_mask` as it is or compiled."""
    indices = None
    count = pairs.length
    if queries is not None:
        indices = pairs.indices(queries)
        count = len(indices)

    def mask_mod(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        if pairs.rule_heads == 1:  # the rule knows one head; the kernel asks for all
            head = torch.zeros_like(head)
        if indices is not None:
            query = indices[query]
        return pairs.sees(row, head, query, key)

    return make(mask_mod, pairs.rows, pairs.rule_heads, count, pairs.length, device=pairs.device)


def attention_by_block_mask(q: Tensor, k: Tensor, v: Tensor, block_mask: BlockMask, scale: float) -> Tensor:
    """Attend to visible keys: q [B, N, S, D], k and v [B, K, S, D] -> [B, N, S, D].

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        block_mask: Blocks of pairs to compute.
        scale: Factor of the scores.
    """
    attend = flex_attention
    if not torch.compiler.is_compiling() and q.device.type != "cpu":
        attend = compiled_attention()
    out: Tensor = attend(q, k, v, block_mask=block_mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out


@cache
def compiled_block_mask() -> Any:
    """Return torch's function, compiled: as it is, it makes a tensor of all pairs."""
    return torch.compile(create_block_mask)


@cache
def compiled_attention() -> Any:
    """Return torch's function, compiled: as it is, it makes a tensor of all pairs."""
    return torch.compile(flex_attention, dynamic=False)
