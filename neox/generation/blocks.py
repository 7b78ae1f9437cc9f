"""The blocks between embedding and final norm, as generation runs them: as modules, which can also be trained.

Legend: B batch, S tokens fed, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from neox.generation.lean_step import LeanStep
from neox.model import KVCache, TransformerLayer


class Blocks(Protocol):
    """The blocks of one rank."""

    def __call__(self, x: Tensor, cache: KVCache | None) -> Tensor:
        """x [B, S, H] -> [B, S, H]: from position 0 on, or behind what the cache holds, to which it appends."""
        ...

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """Return an empty cache for `batch` sequences of at most `capacity` tokens."""
        ...


class ModuleBlocks:
    """The modules, and where all heads are here, a leaner way for single tokens.

    max_length: tokens of context. device, dtype: of hidden states.
    """

    def __init__(
        self, layers: Sequence[TransformerLayer], max_length: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.layers = layers
        self.device, self.dtype = device, dtype
        whole = all(layer.grid.tp_size == 1 for layer in layers)
        self.step = LeanStep(layers, max_length, device, dtype) if whole else None

    def __call__(self, x: Tensor, cache: KVCache | None) -> Tensor:
        length = x.size(1)
        if cache is None:
            positions = torch.arange(length, device=x.device)
            for layer in self.layers:
                x = layer(x, positions)
            return x
        if self.step is not None and length == 1:
            return self.step(x, cache)
        positions = cache.positions(length)
        for layer, part in zip(self.layers, cache.layers(length), strict=True):
            x = layer(x, positions, part)
        cache.advance(length)
        return x

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        attention = self.layers[0].attention if self.layers else None
        heads, head_dim = (attention.heads_here, attention.head_dim) if attention else (0, 0)
        return KVCache(len(self.layers), batch, capacity, heads, head_dim, device=self.device, dtype=self.dtype)
