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
    """Return what `rotate` multiplies with, computed in fp32 and cast to `dtype`.

    Args:
        inv_freq: Angular frequencies [R/2].
        positions: [S], or [B, S] where rows differ.
        dtype: Of the tables.

    Returns:
        [cos, cos] and [-sin, sin] of position x frequency: [S, 1, R], or [B, S, 1, R] (they broadcast over heads).
    """
    angles = (positions.to(torch.float32).unsqueeze(-1) * inv_freq.float()).unsqueeze(-2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first R dims of each head, in pairs (i, i + R/2); the other dims pass unchanged.

    Args:
        x: Queries or keys [B, S, N, D].
        cos: First table of `rotary_tables`.
        sin: Second table of `rotary_tables`.
    """
    width = cos.shape[-1]
    rotated, rest = x.split((width, x.shape[-1] - width), dim=-1)
    # Over all R dims at once: on a CPU, products over halves of a few dims take twice as long.
    return torch.cat((rotated * cos + rotated.roll(width // 2, -1) * sin, rest), dim=-1)
