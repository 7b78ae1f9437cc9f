"""Token embedding with the vocabulary split over tensor ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from neox.parallel.collectives import reduce_over_tensor_ranks
from neox.parallel.grid import ParallelGrid
from neox.parallel.linear import shard_size, split_parameter


class VocabParallelEmbedding(nn.Module):
    """Rows [V/tp, H] of the table on each rank: tokens [B, S] -> [B, S, H] replicated."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        grid: ParallelGrid,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.grid = grid
        here = shard_size(num_embeddings, grid.tp_size, "vocabulary")
        self.first = grid.tp_rank * here
        self.weight = split_parameter(here, embedding_dim, tp_size=grid.tp_size, device=device, dtype=dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        if self.grid.tp_size == 1:
            return F.embedding(tokens, self.weight)
        local = tokens - self.first
        elsewhere = (local < 0) | (local >= self.weight.shape[0])
        rows = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return reduce_over_tensor_ranks(rows.masked_fill(elsewhere.unsqueeze(-1), 0.0), self.grid)
