"""Soft prompt: trained vectors before the tokens of a frozen network (arXiv:2104.08691).

Legend: B batch, S sequence, H hidden, n vectors of the prompt.
"""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor, nn

from neox.parallel import TensorOptions


class SoftPrompt(nn.Module):
    """Layer 1: [B, S, H] -> [B, n + S, H]. Its weight [n, H] has gpt-neox's name."""

    def __init__(self, tokens: int, hidden_size: int, **options: Unpack[TensorOptions]) -> None:
        super().__init__()
        self.soft_embedding_weight = nn.Parameter(torch.empty(tokens, hidden_size, **options))

    def forward(self, x: Tensor, start: Tensor | None = None) -> Tensor:
        """Put the prompt before the tokens.

        Args:
            x: Vectors of the tokens, [B, S, H].
            start: Index of the first token of each row that is padded on the left, [B]. The prompt goes between
                padding and tokens. None if no row is padded.
        """
        prompt = self.soft_embedding_weight.to(x.dtype).expand(x.shape[0], -1, -1)
        if start is None:
            return torch.cat([prompt, x], dim=1)
        count = prompt.shape[1]
        first = start.unsqueeze(1)
        index = torch.arange(count + x.shape[1], device=x.device).expand(x.shape[0], -1)
        # Indices into [prompt, x]: first the padding, then the prompt, then the tokens.
        source = torch.where(index < first, index + count, torch.where(index < first + count, index - first, index))
        return torch.cat([prompt, x], dim=1).gather(1, source.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
