"""Log-probabilities of spans of tokens: what every score here is made of.

Shapes: B sequences, S tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from neox.errors import EvaluationError


class ScoringModel(Protocol):
    """What evaluation asks of a model, wherever its layers are."""

    max_length: int
    """Longest sequence in tokens."""
    device: torch.device

    def score(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return each label's log-probability, float32 [B, S], and whether it is the most probable token, bool [B, S].

        tokens, labels: int64 [B, S]. The same on every rank of the model.
        """
        ...


@dataclass(frozen=True)
class Span:
    """Tokens of which those from `first` (at least 1) on are scored, each given all before it.

    Spans of an array are views of it: a corpus of 10^9 tokens is in memory once, and not as Python's integers.
    """

    tokens: Sequence[int] | np.ndarray
    first: int


@dataclass(frozen=True)
class SpanScore:
    """log_probability: natural log, summed over the scored tokens. count: how many. greedy: every one was the most
    probable; last_greedy: the last one was."""

    log_probability: float
    count: int
    greedy: bool
    last_greedy: bool


def windows(tokens: Sequence[int] | np.ndarray, length: int, stride: int) -> Iterator[Span]:
    """Cut a text into windows of at most `length` predicted tokens that start every `stride` tokens.

    The first window scores all of its tokens, each later one the last `stride` (what is new in it), so that every token
    but the first is scored once, with at least `length - stride` tokens before it where the text has them.
    Raises EvaluationError unless 1 <= stride <= length.
    """
    if not 1 <= stride <= length:
        raise EvaluationError(f"eval_stride is {stride}: it must lie between 1 and the window, {length} tokens")
    start = 0
    while True:
        part = tokens[start : start + length + 1]
        first = 1 if start == 0 else length - stride + 1
        if len(part) > first:
            yield Span(part, first)
        if start + length + 1 >= len(tokens):
            return
        start += stride


def score_spans(
    model: ScoringModel,
    spans: Sequence[Span],
    *,
    batch_size: int = 8,
    done: Callable[[int], None] | None = None,
) -> list[SpanScore]:
    """Score spans in batches of similar lengths; results in the order of the spans. done: told how many are through.

    Raises EvaluationError for a span longer than the model's context and for logits that are not numbers.
    """
    for span in spans:
        if len(span.tokens) - 1 > model.max_length:
            raise EvaluationError(
                f"{len(span.tokens) - 1} tokens are to be read at once, and this model's context is {model.max_length} "
                "(max_position_embeddings)"
            )
    results: dict[int, SpanScore] = {}
    order = sorted(range(len(spans)), key=lambda n: -len(spans[n].tokens))
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]
        results.update(zip(batch, _score_batch(model, [spans[n] for n in batch]), strict=True))
        if done:
            done(len(batch))
    return [results[n] for n in range(len(spans))]


@torch.inference_mode()
def _score_batch(model: ScoringModel, spans: Sequence[Span]) -> Iterable[SpanScore]:
    """Score one batch, padded on the right, where causality keeps the padding out of every scored token."""
    rows = np.zeros((len(spans), max(len(span.tokens) for span in spans)), dtype=np.int64)
    for row, span in zip(rows, spans, strict=True):
        row[: len(span.tokens)] = span.tokens
    padded = torch.from_numpy(rows).to(model.device)
    log_probabilities, greedy = model.score(padded[:, :-1], padded[:, 1:])
    log_probabilities, greedy = log_probabilities.double().cpu(), greedy.cpu()
    for number, span in enumerate(spans):
        place = slice(span.first - 1, len(span.tokens) - 1)
        total = log_probabilities[number, place].sum().item()
        if total != total:
            raise EvaluationError(
                "the model's log-probabilities are not numbers (NaN): the weights are broken, or overflow in this "
                "precision; look at the training loss of this checkpoint, try an earlier one, or evaluate in fp32"
            )
        hits = greedy[number, place]
        yield SpanScore(total, hits.numel(), bool(hits.all()), bool(hits[-1]))
