"""Head of a reward model, which gives each text one number: its score.

Legend: H hidden, T tensor ranks.
"""

from __future__ import annotations

from typing import Unpack

from torch import Tensor, nn

from neox.model.embedding import LMHead
from neox.parallel import ParallelGrid, RowParallelLinear, TensorOptions, scatter_last_dim


class ScoreHead(nn.Module):
    """Layer L+4 of a reward model: hidden states [..., H] -> scores [..., 1], equal on all tensor ranks.

    The weight is split over tensor ranks along the hidden dimension, as in gpt-neox. The score of a text is that of its
    last token, as in transformers' sequence classification models.

    Args:
        hidden_size: H.
        grid: Process groups.
        **options: Device and type of the weight.
    """

    def __init__(self, hidden_size: int, grid: ParallelGrid, **options: Unpack[TensorOptions]) -> None:
        super().__init__()
        self.grid = grid
        self.rm_linear = RowParallelLinear(hidden_size, 1, grid, bias=False, **options)

    @property
    def head(self) -> LMHead:
        """The head as objectives use it, with the scores as its logits."""
        return LMHead(self.grid, self.rm_linear.weight, self, row=True)

    def forward(self, x: Tensor) -> Tensor:
        """Score hidden states."""
        scores: Tensor = self.rm_linear(scatter_last_dim(x, self.grid))
        return scores
