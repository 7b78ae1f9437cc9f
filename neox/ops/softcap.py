"""Soft bound of scores and logits (Gemma 2, arXiv:2408.00118)."""

from __future__ import annotations

import torch
from torch import Tensor


def softly_capped(x: Tensor, bound: float) -> Tensor:
    """Return bound x tanh(x / bound), which lies within -bound and bound; x itself for a bound of 0."""
    if bound == 0.0:
        return x
    return torch.tanh(x / bound) * bound
