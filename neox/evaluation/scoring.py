"""Log-probabilities of token spans, from which every score is computed.

Shapes: B sequences, S tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from neox.errors import EvaluationError
from neox.generation.completion import over_replicas
from neox.log import progress
from neox.parallel import ParallelGrid
from neox.tokenizer import Tokenizer

TokenIds = Sequence[int] | np.ndarray


class ScoringModel(Protocol):
    """Model that can score tokens, on one rank or split over several.

    Attributes:
        max_length: Longest sequence in tokens.
        device: Device of the tensors given to `score`.
        scores_by_length: Whether positions depend on the length of a row, its padding included (`longrope`, `dynamic`).
    """

    max_length: int
    device: torch.device
    scores_by_length: bool

    def score(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Score the label of every position.

        Args:
            tokens: int64 [B, S].
            labels: int64 [B, S], the token after each position.

        Returns:
            Log-probability of each label, float32 [B, S], and whether it is the most probable token, bool [B, S]. Both
            are equal on every rank of the model.
        """
        ...


@dataclass(frozen=True)
class Span:
    """Tokens to score, each given all tokens before it.

    Attributes:
        tokens: Context and scored tokens. It may be a view of an array, so that a corpus is held in memory once.
        first: Index of the first scored token, at least 1.
    """

    tokens: TokenIds
    first: int


@dataclass(frozen=True)
class SpanScore:
    """Score of one span.

    Attributes:
        log_probability: Natural logarithm, summed over the scored tokens.
        count: Number of scored tokens.
        greedy: Whether every scored token was the most probable one.
    """

    log_probability: float
    count: int
    greedy: bool


@dataclass(frozen=True)
class Scorer:
    """Model, tokenizer and window settings with which texts are scored. All ranks use it together.

    Attributes:
        model: Model that scores.
        tokenizer: Tokenizer of the model.
        grid: Process groups.
        window: Number of predicted tokens per window.
        stride: Number of new tokens per window; None means all of them (windows do not overlap).
        batch_size: Number of windows scored at once.
        limit: Number of passages, documents or articles of a file that are scored; None means all.
    """

    model: ScoringModel
    tokenizer: Tokenizer
    grid: ParallelGrid
    window: int
    stride: int | None = None
    batch_size: int = 8
    limit: int | None = None

    def score(self, spans: Sequence[Span], name: str) -> list[SpanScore]:
        """Score spans, divided among the data-parallel ranks. Rank 0 shows the progress of its part as `name`."""

        def score_part(part: Sequence[Span]) -> list[SpanScore]:
            if self.grid.rank != 0:
                return score_spans(self.model, part, batch_size=self.batch_size)
            with progress(name, len(part), "texts") as bar:
                return score_spans(self.model, part, batch_size=self.batch_size, on_batch=bar.update)

        return over_replicas(spans, score_part, self.grid)

    def rolling(self, texts: Iterable[Span], name: str) -> list[SpanScore]:
        """Score texts of any length in `rolling_windows`.

        Returns:
            One score per text, in their order.
        """
        spans: list[Span] = []
        counts: list[int] = []  # windows of each text
        for text in texts:
            before = len(spans)
            spans += rolling_windows(text, self.window, self.stride or self.window)
            counts.append(len(spans) - before)
        scores = iter(self.score(spans, name))
        totals = []
        for count in counts:
            totals.append(joined_score(islice(scores, count)))
        return totals


def joined_score(scores: Iterable[SpanScore]) -> SpanScore:
    """Return the score of spans that follow one another."""
    log_probability = 0.0
    count = 0
    greedy = True
    for score in scores:
        log_probability += score.log_probability
        count += score.count
        greedy = greedy and score.greedy
    return SpanScore(log_probability, count, greedy)


def rolling_windows(text: Span, length: int, stride: int) -> Iterator[Span]:
    """Cut a text into windows that score each of its tokens once, as lm-evaluation-harness does.

    The first window scores all its tokens, every later one the next `stride` tokens, or as many as are left, after as
    much context as there is room for. With a length of 4 and a stride of 4 (c context, s scored):

        c s s s s
                c s s s s
                    c c c s s

    Args:
        text: The text after its context.
        length: Positions of the model that a window takes: one less than its tokens.
        stride: Tokens that a window scores. The harness's `context_len` is `length - stride + 1`.

    Raises:
        EvaluationError: Unless 1 <= stride <= length.
    """
    _check_stride(stride, length)
    end = min(len(text.tokens), length + 1)
    if end > text.first:
        yield Span(text.tokens[:end], text.first)
    while end < len(text.tokens):
        start = end
        end = min(len(text.tokens), start + stride)
        first_of_window = end - (length + 1)
        yield Span(text.tokens[first_of_window:end], start - first_of_window)


def windows(tokens: TokenIds, length: int, stride: int) -> Iterator[Span]:
    """Cut a text into windows of at most `length` predicted tokens that start every `stride` tokens.

    These are Megatron-LM's windows. The first one scores all its tokens, every later one its last `stride` tokens. So
    every token but the first is scored once, with at least `length - stride` tokens of context if the text has them.

    Raises:
        EvaluationError: Unless 1 <= stride <= length.
    """
    _check_stride(stride, length)
    start = 0
    while True:
        part = tokens[start : start + length + 1]
        first = 1 if start == 0 else length - stride + 1
        if len(part) > first:
            yield Span(part, first)
        if start + length + 1 >= len(tokens):
            return
        start += stride


def _check_stride(stride: int, length: int) -> None:
    """Raise EvaluationError for a stride that would leave out tokens, or stand still."""
    if not 1 <= stride <= length:
        raise EvaluationError(f"eval_stride is {stride}: it must be between 1 and the window, {length} tokens")


def score_spans(
    model: ScoringModel,
    spans: Sequence[Span],
    *,
    batch_size: int = 8,
    on_batch: Callable[[int], object] | None = None,
) -> list[SpanScore]:
    """Score spans in batches of similar lengths.

    Args:
        model: Model that scores.
        spans: Spans of at most `model.max_length + 1` tokens.
        batch_size: Number of spans per batch.
        on_batch: Function that is called after each batch with its number of spans.

    Returns:
        One score per span, in their order.

    Raises:
        EvaluationError: For a span longer than the model's context, and for log-probabilities that are NaN.
    """
    for span in spans:
        if len(span.tokens) - 1 > model.max_length:
            raise EvaluationError(
                f"a window of {len(span.tokens) - 1} tokens (seq_length) is longer than this model's context of "
                f"{model.max_length} tokens (max_position_embeddings)"
            )
    results: dict[int, SpanScore] = {}
    for batch in _batches(spans, batch_size, one_length=model.scores_by_length):
        scores = _score_batch(model, [spans[number] for number in batch])
        results.update(zip(batch, scores, strict=True))
        if on_batch:
            on_batch(len(batch))
    return [results[number] for number in range(len(spans))]


def _batches(spans: Sequence[Span], batch_size: int, *, one_length: bool) -> Iterator[list[int]]:
    """Yield the numbers of the spans of each batch, the longest first; with `one_length` none of a batch is padded."""
    batch: list[int] = []
    for number in sorted(range(len(spans)), key=lambda number: -len(spans[number].tokens)):
        is_shorter = bool(batch) and len(spans[number].tokens) < len(spans[batch[0]].tokens)
        if len(batch) == batch_size or (one_length and is_shorter):
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


@torch.inference_mode()
def _score_batch(model: ScoringModel, spans: Sequence[Span]) -> Iterable[SpanScore]:
    """Score one batch, padded on the right. Causal attention keeps the padding out of every scored token."""
    longest = max(len(span.tokens) for span in spans)
    rows = np.zeros((len(spans), longest), dtype=np.int64)
    for row, span in zip(rows, spans, strict=True):
        row[: len(span.tokens)] = span.tokens
    padded = torch.from_numpy(rows).to(model.device)
    log_probabilities, greedy = model.score(padded[:, :-1], padded[:, 1:])
    log_probabilities = log_probabilities.double().cpu()
    greedy = greedy.cpu()
    for number, span in enumerate(spans):
        scored = slice(span.first - 1, len(span.tokens) - 1)
        total = log_probabilities[number, scored].sum().item()
        if math.isnan(total):
            raise EvaluationError(
                "the model's log-probabilities are NaN: the weights are broken or overflow in this precision; check "
                "the training loss of this checkpoint, try an earlier one, or set inference_precision: fp32"
            )
        hits = greedy[number, scored]
        yield SpanScore(total, hits.numel(), bool(hits.all()))
