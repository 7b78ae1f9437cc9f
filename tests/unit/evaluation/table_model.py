"""A scoring model whose probabilities are known: the next token is drawn from a fixed row of a table."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from neox.tokenizer import Tokenizer


class TableModel:
    """P(next | last) = softmax(table[last]); remembers the widths of the batches it saw."""

    device = torch.device("cpu")
    scores_by_length = False

    def __init__(self, vocab: int = 300, max_length: int = 64, seed: int = 0) -> None:
        table = torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(seed))
        self.log_probabilities = table.log_softmax(-1)
        self.max_length = max_length
        self.batches: list[tuple[int, int]] = []

    def score(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        self.batches.append(tuple(tokens.shape))
        rows = self.log_probabilities[tokens]
        return rows.gather(2, labels[..., None]).squeeze(2), rows.argmax(-1) == labels

    def total(self, tokens: list[int], first: int = 1) -> float:
        """Log-probability of tokens[first:], one by one."""
        pairs = list(pairwise(tokens))[first - 1 :]
        return sum(self.log_probabilities[a, b].double().item() for a, b in pairs)


class ByteTokenizer(Tokenizer):
    """Ids are UTF-8 bytes; 256 ends a document."""

    name = "bytes"
    vocab_size = 257
    eod = 256
    content_hash = "bytes"
    known_hashes = ("bytes",)

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: list[int]) -> str:
        return bytes(token for token in ids if token < 256).decode(errors="replace")

    def _content(self) -> None:
        return None
