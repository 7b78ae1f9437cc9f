"""The largest score of attention, which no kernel of attention keeps.

Legend: B batch, S sequence, N heads of queries, K of keys, G = N / K, D head dim, C queries of a chunk, L keys.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_QUERIES = 256
"""Queries whose scores are held at the same time."""


@torch.no_grad()
def largest_score(q: Tensor, k: Tensor, scale: float, *, causal: bool) -> Tensor:
    """Return the largest scaled product of a query and a key, in fp32: q [B, S, N, D], k [B, S, K, D] -> scalar.

    Masks and biases are left out, apart from the causal mask.

    Args:
        q: Queries; G neighbouring heads share a head of keys.
        k: Keys.
        scale: Factor of the products.
        causal: Whether a query sees only its own key and earlier ones.
    """
    length = q.shape[1]
    keys = k.permute(0, 2, 3, 1)  # [B, K, D, S]
    queries = (q * scale).unflatten(2, (k.shape[2], -1)).permute(0, 2, 3, 1, 4)  # [B, K, G, S, D]
    largest = torch.full((), -math.inf, device=q.device)
    for start in range(0, length, _QUERIES):
        end = min(start + _QUERIES, length)
        seen = end if causal else length
        scores = torch.matmul(queries[:, :, :, start:end].flatten(2, 3), keys[..., :seen])  # [B, K, G*C, L]
        scores = scores.unflatten(2, (-1, end - start))
        if causal:
            later = torch.ones(end - start, seen, dtype=torch.bool, device=q.device).triu_(start + 1)
            scores = scores.masked_fill(later, -math.inf)
        largest = torch.maximum(largest, scores.amax().float())
    return largest
