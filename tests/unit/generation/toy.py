"""A language model and a tokenizer small enough to reason about, for tests of what is built on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from neox.generation.decoding import TokenScores
from neox.tokenizer import Tokenizer


class ToyCodec(Tokenizer):
    """Letters: `a` is 1, `b` is 2, ...; 0 ends a document."""

    name = "toy"
    vocab_size = 27
    eod = 0
    end_ids = (0,)

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - ord("a") + 1 for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(ord("a") + token - 1) for token in ids)

    def _content(self) -> None:
        return None


class ToyModel:
    """Logits are `rule(ids of the sequence so far)`; padding never reaches the rule."""

    device = torch.device("cpu")

    def __init__(self, rule: Callable[[list[int]], Tensor], vocab_size: int = 27, max_length: int = 64) -> None:
        self.rule, self.vocab_size, self.max_length = rule, vocab_size, max_length

    def begin(self, lengths: Sequence[int], capacity: int) -> ToyDecoding:
        return ToyDecoding(self, lengths, capacity)

    def token_scores(self, tokens: Tensor, labels: Tensor, count: int) -> TokenScores:
        rows = [[self.rule(row[: end + 1]) for end in range(len(row))] for row in tokens.tolist()]
        scores = torch.stack([torch.stack(row) for row in rows]).log_softmax(-1)
        top = scores.topk(count, dim=-1)
        return TokenScores(scores.gather(-1, labels[..., None]).squeeze(-1), top.indices, top.values)


class ToyDecoding:
    def __init__(self, model: ToyModel, lengths: Sequence[int], capacity: int) -> None:
        self.model, self.lengths, self.capacity = model, lengths, capacity
        self.read: list[list[int]] = []

    def feed(self, tokens: Tensor) -> Tensor:
        rows = tokens.tolist()
        if self.read:
            assert tokens.size(1) == 1
            self.read = [old + new for old, new in zip(self.read, rows, strict=True)]
        else:
            self.read = [row[len(row) - length :] for row, length in zip(rows, self.lengths, strict=True)]
        assert max(map(len, self.read)) <= self.capacity
        return torch.stack([self.model.rule(row) for row in self.read])

    def reorder(self, rows: Tensor) -> None:
        self.read = [list(self.read[row]) for row in rows.tolist()]


def next_letter(ids: list[int]) -> Tensor:
    """After `a` comes `b`, ..., after `z` the end."""
    return torch.nn.functional.one_hot(torch.tensor((ids[-1] + 1) % 27), 27).float() * 10


def hashed(ids: list[int]) -> Tensor:
    """Logits that depend on every id before."""
    seed = 0
    for token in ids:
        seed = (seed * 31 + token + 1) % 1_000_003
    return torch.randn(27, generator=torch.Generator().manual_seed(seed)) * 2


CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def shouting(ids: list[int]) -> Tensor:
    """Bytes that answer the last question of CHAT_TEMPLATE in capitals, after the number of questions.

    The model goes on with a question of its own, which a server has to cut off.
    """
    asked, _, written = bytes(ids).rpartition(b"assistant:")
    questions = asked.decode().split("user: ")[1:]
    said = f" {len(questions)}{questions[-1].strip().upper()}\n\nuser: more?\n\n".encode()
    return torch.nn.functional.one_hot(torch.tensor(said[len(written)]), 512).float() * 30
