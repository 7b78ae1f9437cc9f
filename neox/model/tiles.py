"""Tiled computation of the token-wise parts of a block, such as MLPs and norms (ALST, arXiv:2506.13996).

Legend: B batch, S sequence, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from neox.parallel import ParallelGrid


class TokenTiles:
    """Calls a function tile by tile, so that memory holds the activations of only one tile.

    The backward pass recomputes one tile at a time.

    Args:
        size: Largest number of tokens of a sample in a tile; None for all of them.
        grid: Process groups. Their random number generators are replayed in the backward pass.
    """

    def __init__(self, size: int | None, grid: ParallelGrid) -> None:
        self.size = size
        self.grid = grid

    def divide(self, x: Tensor, shares: int = 1) -> bool:
        """Return whether hidden states [B, S, H] need more than one tile.

        Args:
            x: Hidden states of all tokens, or of this rank's share of them.
            shares: Number of shares into which the tokens are divided.
        """
        return self.size is not None and x.shape[1] > self._length(shares)

    def run(self, function: Callable[[Tensor], Tensor], x: Tensor, shares: int = 1) -> Tensor:
        """Call a function [B, S, H] -> [B, S, H] tile by tile; the other arguments are those of `divide`."""
        if not self.divide(x, shares):
            return function(x)
        results = []
        for tile in x.split(self._length(shares), dim=1):
            if torch.is_grad_enabled():
                results.append(self.grid.rng.checkpoint(function, tile))
            else:
                results.append(function(tile))
        return torch.cat(results, dim=1)

    def _length(self, shares: int) -> int:
        """Return the number of tokens of a tile in one share."""
        assert self.size is not None
        return max(1, self.size // shares)
