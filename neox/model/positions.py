"""Positions by name: what they do to queries and keys.

Legend: B batch, S sequence, N heads here, D head dim, R rotary dims.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn

from neox.architecture import Architecture
from neox.ops import rotary_inv_freq, rotary_tables, rotate

Tables = tuple[Tensor, ...]
"""What a position encoding computes from the tokens' positions once for all blocks."""


class PositionEncoding(nn.Module):
    """What a position encoding does to queries and keys."""

    def reset(self) -> None:
        """Compute the buffers again, after a module made on the meta device got memory."""

    def tables(self, positions: Tensor, dtype: torch.dtype) -> Tables:
        """Return what `forward` needs for positions [S] or [B, S]: computed once for all blocks."""
        raise NotImplementedError

    def forward(self, queries_keys: Tensor, tables: Tables) -> Tensor:
        """Encode queries and keys side by side: [B, S, N, 2, D] -> the same shape."""
        raise NotImplementedError


class RotaryEmbedding(PositionEncoding):
    """Rotary positions (RoFormer, arXiv:2104.09864). Holds the buffer `inv_freq` [R/2], fp32, as NeoX's files do."""

    inv_freq: Tensor

    def __init__(self, architecture: Architecture, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.rotary_ndims, self.base = architecture.rotary_ndims, architecture.rotary_base
        self.register_buffer("inv_freq", rotary_inv_freq(self.rotary_ndims, self.base, device))

    def reset(self) -> None:
        """Compute the buffer again, after a module made on the meta device got memory."""
        self.inv_freq.copy_(rotary_inv_freq(self.rotary_ndims, self.base, self.inv_freq.device))

    def tables(self, positions: Tensor, dtype: torch.dtype) -> Tables:
        """Return cosines and sines for positions [S] or [B, S]: [S, 1, 1, R] or [B, S, 1, 1, R]."""
        cos, sin = rotary_tables(self.inv_freq, positions, dtype)
        return cos.unsqueeze(-2), sin.unsqueeze(-2)

    def forward(self, queries_keys: Tensor, tables: Tables) -> Tensor:
        """Rotate queries and keys side by side: [B, S, N, 2, D] -> the same shape."""
        return rotate(queries_keys, *tables)


POSITIONS: Mapping[str, Callable[..., PositionEncoding] | None] = MappingProxyType(
    {"rotary": RotaryEmbedding, "none": None}
)
"""Name -> constructor (architecture, device), or None where nothing is done to queries and keys."""


def reset_buffers(layer: nn.Module) -> None:
    """Compute the buffers of a layer that was made on the meta device and got memory.

    Raises:
        TypeError: A module has buffers and cannot compute them again.
    """
    for module in layer.modules():
        if isinstance(module, PositionEncoding):
            module.reset()
        elif next(module.buffers(recurse=False), None) is not None:
            raise TypeError(f"{type(module).__name__} has buffers that nothing computes again")
