"""Heads of a bidirectional encoder: masked tokens (tied to the embedding), and pairs of sentences (BERT).

Legend: B batch, S sequence, H hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor, nn

from neox.architecture import Architecture
from neox.architecture.encoder import SENTENCE_CLASSES
from neox.model.embedding import Embedding, LMHead
from neox.ops import ACTIVATIONS, build_norm, linear
from neox.parallel import ParallelGrid, TensorOptions, copy_to_tensor_ranks, mark_split, shard_size


class MaskedLMHead(nn.Module):
    """Layer L+4: dense layer, activation and norm of hidden states [..., H], and a bias of the logits.

    Between them, hidden states are multiplied by the words' vectors, which layer 0 holds (`encoder_head`).
    """

    def __init__(
        self, architecture: Architecture, padded_vocab_size: int, grid: ParallelGrid, **options: Unpack[TensorOptions]
    ) -> None:
        super().__init__()
        self.grid = grid
        self.dense = nn.Linear(architecture.hidden_size, architecture.hidden_size, **options)
        self.activation = ACTIVATIONS[architecture.activation]
        self.layernorm = build_norm(architecture, **options)
        self.final_linear = _Bias(padded_vocab_size, grid, **options)

    def forward(self, x: Tensor) -> Tensor:
        """Prepare hidden states for the product with the words' vectors."""
        prepared: Tensor = self.layernorm(self.activation(self.dense(x)))
        return prepared


class _Bias(nn.Module):
    """Bias of this rank's part of the logits."""

    def __init__(self, padded_vocab_size: int, grid: ParallelGrid, **options: Unpack[TensorOptions]) -> None:
        super().__init__()
        here = torch.empty(shard_size(padded_vocab_size, grid.tp_size, "vocabulary"), **options)
        self.bias = mark_split(nn.Parameter(here), grid.tp_size > 1)


class Pooler(nn.Module):
    """The first token's hidden state through a dense layer and tanh: [B, S, H] -> [B, H]."""

    def __init__(self, hidden_size: int, **options: Unpack[TensorOptions]) -> None:
        super().__init__()
        self.dense = nn.Linear(hidden_size, hidden_size, **options)

    def forward(self, x: Tensor) -> Tensor:
        """Pool hidden states."""
        return torch.tanh(self.dense(x[:, 0]))


class SentenceHead(nn.Module):
    """Layer L+5: whether the second sentence follows the first (class 0) or not (1): [B, S, H] -> logits [B, 2]."""

    def __init__(self, architecture: Architecture, **options: Unpack[TensorOptions]) -> None:
        super().__init__()
        self.pooler = Pooler(architecture.hidden_size, **options)
        self.binary_head = nn.Linear(architecture.hidden_size, SENTENCE_CLASSES, **options)

    def forward(self, x: Tensor) -> Tensor:
        """Classify samples."""
        logits: Tensor = self.binary_head(self.pooler(x))
        return logits


def encoder_head(words: Embedding, head: MaskedLMHead, sentences: SentenceHead | None) -> LMHead:
    """Return the heads of a bidirectional network as a loss uses them."""
    weight = words.word_embeddings.weight
    bias = head.final_linear.bias

    def logits(x: Tensor) -> Tensor:
        return linear(copy_to_tensor_ranks(head(x), head.grid), weight, bias)

    return LMHead(head.grid, weight, logits, bias=bias, prepare=head, sentences=sentences)
