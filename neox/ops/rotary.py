"""Rotary position embedding on the first dimensions of each head (RoFormer, arXiv:2104.09864; half-split as in NeoX).

Legend: B batch, S sequence, N heads, D head dim, R rotary dims (even, <= D).
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_inv_freq(rotary_ndims: int, base: float, device: torch.device | str | None = None) -> Tensor:
    """Return the R/2 angular frequencies base^(-2i/R), fp32."""
    exponents = torch.arange(0, rotary_ndims, 2, dtype=torch.float32, device=device) / rotary_ndims
    return 1.0 / (base**exponents)


def rotary_tables(inv_freq: Tensor, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cos and sin of position x frequency, computed in fp32 and cast to `dtype`.

    positions: [S], or [B, S] where rows differ. Tables: [S, 1, R/2], or [B, S, 1, R/2] (they broadcast over heads).
    """
    angles = positions.to(torch.float32).unsqueeze(-1) * inv_freq.float()
    angles = angles.unsqueeze(-2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first R dims of x [B, S, N, D]: pairs are (i, i + R/2). The other dims pass unchanged."""
    half = cos.shape[-1]
    # One split, not three slices: its gradient is one concatenation instead of three zero-filled tensors.
    first, second, rest = x.split((half, half, x.shape[-1] - 2 * half), dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
