"""Low-rank adapters of linear layers that are split over tensor ranks, or that each rank computes whole.

Legend: I input features, O output features, R rank of the adapter.
"""

from __future__ import annotations

from typing import Literal

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
        split: What tensor ranks divide: the outputs (column-parallel), the inputs (row-parallel), or nothing.
    """

    def __init__(
        self,
        weight: Tensor,
        grid: ParallelGrid,
        rank: int,
        scale: float,
        dropout: float,
        *,
        split: Literal["outputs", "inputs", "nothing"],
    ) -> None:
        super().__init__()
        self.grid = grid
        self.scale = scale
        self.dropout = dropout
        self.split = split
        outputs, inputs = weight.shape
        self.lora_A = nn.Parameter(torch.empty(rank, inputs, device=weight.device, dtype=weight.dtype))
        self.lora_B = nn.Parameter(torch.empty(outputs, rank, device=weight.device, dtype=weight.dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's result: [..., I] -> [..., O/tp], or [..., I/tp] -> a summand of [..., O].

        Every rank holds all of A x or of B, and computes a part of its gradient. With sequence parallelism the inputs
        [..., I] are a share of the tokens; the result is for all tokens, but for this share if nothing is divided.
        """
        inner = F.linear(self._dropped(x), self.lora_A)
        if self.split == "nothing":
            return self.scale * F.linear(inner, self.lora_B)
        if self.split == "inputs":
            return self.scale * F.linear(inner, copy_to_tensor_ranks(self.lora_B, self.grid))
        if self.shares > 1:
            inner = copy_tokens_to_tensor_ranks(inner, self.grid)
        else:
            inner = copy_to_tensor_ranks(inner, self.grid)
        return self.scale * F.linear(inner, self.lora_B)

    def merged_into(self, weight: Tensor) -> Tensor:
        """Return weight + scale B A, with which the layer computes the same: [O/tp, I], outside of training."""
        return weight + self.scale * (self.lora_B @ self.lora_A)

    def parameters_on_shares(self) -> tuple[nn.Parameter, ...]:
        """Return what multiplies a share of the tokens: A, also B if nothing is divided; neither with split inputs."""
        if self.split == "outputs":
            return (self.lora_A,)
        if self.split == "nothing":
            return (self.lora_A, self.lora_B)
        return ()

    def _dropped(self, x: Tensor) -> Tensor:
        if not self.training or self.dropout == 0.0:
            return x
        if self.split != "inputs" or not self.grid.rng.enabled:
            return F.dropout(x, self.dropout)
        with self.grid.rng.fork(x.device):  # each rank has other inputs
            return F.dropout(x, self.dropout)
