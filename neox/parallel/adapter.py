"""Low-rank adapter of a linear layer that is split over tensor ranks.

Legend: I input features, O output features, R rank of the adapter.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from neox.parallel.collectives import copy_to_tensor_ranks, copy_tokens_to_tensor_ranks
from neox.parallel.grid import ParallelGrid
from neox.parallel.token_shares import TokenShares


class Adapter(TokenShares):
    """The summand scale * B A dropout(x) of a linear layer (LoRA, arXiv:2106.09685).

    Args:
        weight: The layer's weight on this rank, for sizes, device and type.
        grid: Process groups.
        rank: R.
        scale: Factor of the product.
        dropout: Probability of dropping an input in training.
        split_outputs: Whether tensor ranks divide the outputs (column-parallel) or the inputs (row-parallel).
    """

    def __init__(
        self, weight: Tensor, grid: ParallelGrid, rank: int, scale: float, dropout: float, *, split_outputs: bool
    ) -> None:
        super().__init__()
        self.grid, self.scale, self.dropout, self.split_outputs = grid, scale, dropout, split_outputs
        outputs, inputs = weight.shape
        self.lora_A = nn.Parameter(torch.empty(rank, inputs, device=weight.device, dtype=weight.dtype))
        self.lora_B = nn.Parameter(torch.empty(outputs, rank, device=weight.device, dtype=weight.dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Return the summand of this rank: [..., I] -> [..., O/tp], or [..., I/tp] -> a part of the sum [..., O].

        What is whole on every rank, A x or B, has a gradient of which each rank computes a part. [..., I] may be of a
        share of the tokens; the result is of all.
        """
        x, up = F.linear(self._dropped(x), self.lora_A), self.lora_B
        if self.split_outputs:
            copied = copy_tokens_to_tensor_ranks if self.shares > 1 else copy_to_tensor_ranks
            return self.scale * F.linear(copied(x, self.grid), up)
        return self.scale * F.linear(x, copy_to_tensor_ranks(up, self.grid))

    def parameters_on_shares(self) -> tuple[nn.Parameter, ...]:
        """Return A, where it multiplies a share of the tokens."""
        return (self.lora_A,) if self.split_outputs else ()

    def _dropped(self, x: Tensor) -> Tensor:
        if not self.training or self.dropout == 0.0:
            return x
        if self.split_outputs or not self.grid.rng.enabled:
            return F.dropout(x, self.dropout)
        with self.grid.rng.fork(x.device):  # each rank has other inputs
            return F.dropout(x, self.dropout)
