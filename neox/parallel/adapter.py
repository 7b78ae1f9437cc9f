"""Low-rank adapters of linear layers that are split over tensor ranks.

Legend: I input features, O output features, R rank of the adapter.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from neox.parallel.collectives import copy_to_tensor_ranks, copy_tokens_to_tensor_ranks
from neox.parallel.grid import ParallelGrid
from neox.parallel.token_shares import TokenShares


class LowRankAdapter(nn.Module):
    """Summand scale * B A x of a linear layer, or of one of each expert (LoRA, arXiv:2106.09685).

    Attributes:
        scale: Factor of the product, which 0 switches off.
    """

    scale: float


class Adapter(LowRankAdapter, TokenShares):
    """Summand scale * B A dropout(x) of a linear layer.

    Args:
        weight: The layer's weight on this rank, which gives sizes, device and type.
        grid: Process groups.
        rank: Rank of the product, R.
        scale: Factor of the product.
        dropout: Probability of dropping an input in training.
        split_outputs: Whether tensor ranks divide the outputs (column-parallel); otherwise the inputs (row-parallel).
    """

    def __init__(
        self, weight: Tensor, grid: ParallelGrid, rank: int, scale: float, dropout: float, *, split_outputs: bool
    ) -> None:
        super().__init__()
        self.grid = grid
        self.scale = scale
        self.dropout = dropout
        self.split_outputs = split_outputs
        outputs, inputs = weight.shape
        self.lora_A = nn.Parameter(torch.empty(rank, inputs, device=weight.device, dtype=weight.dtype))
        self.lora_B = nn.Parameter(torch.empty(outputs, rank, device=weight.device, dtype=weight.dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's result: [..., I] -> [..., O/tp], or [..., I/tp] -> a summand of [..., O].

        Every rank holds all of A x or of B, and computes a part of its gradient. With sequence parallelism the inputs
        [..., I] are a share of the tokens; the result is for all tokens.
        """
        inner = F.linear(self._dropped(x), self.lora_A)
        if not self.split_outputs:
            return self.scale * F.linear(inner, copy_to_tensor_ranks(self.lora_B, self.grid))
        if self.shares > 1:
            inner = copy_tokens_to_tensor_ranks(inner, self.grid)
        else:
            inner = copy_to_tensor_ranks(inner, self.grid)
        return self.scale * F.linear(inner, self.lora_B)

    def parameters_on_shares(self) -> tuple[nn.Parameter, ...]:
        """Return A, if it multiplies a share of the tokens."""
        if self.split_outputs:
            return (self.lora_A,)
        return ()

    def _dropped(self, x: Tensor) -> Tensor:
        if not self.training or self.dropout == 0.0:
            return x
        if self.split_outputs or not self.grid.rng.enabled:
            return F.dropout(x, self.dropout)
        with self.grid.rng.fork(x.device):  # each rank has other inputs
            return F.dropout(x, self.dropout)
