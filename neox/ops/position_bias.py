"""Biases of attention scores by distance: ALiBi's slopes and T5's buckets."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def alibi_slopes(heads: int) -> list[float]:
    """Return each head's slope (ALiBi, arXiv:2108.12409): 2^(-8/n), 2^(-16/n), ... for a power of two n.

    Other numbers of heads get the slopes of the power of two below, then every second slope of twice as many heads.
    """
    power = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    return slopes + [2.0 ** (-4.0 * (2 * i + 1) / power) for i in range(heads - power)]


def relative_buckets(distance: Tensor, buckets: int, max_distance: int) -> Tensor:
    """Return the bucket of each distance >= 0 (T5, arXiv:1910.10683, causal).

    Each bucket of the first half holds one distance. The second half divides distances up to `max_distance`
    logarithmically, and its last bucket holds all larger ones.
    """
    exact = buckets // 2
    octaves = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    far = exact + (octaves * (buckets - exact)).long()
    return torch.where(distance < exact, distance, far.clamp(max=buckets - 1))
