"""Log-probabilities of texts in JSON lines under a language model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from neox.corpus import BadRecord
from neox.evaluation.results import bits_per_byte, perplexity_of
from neox.evaluation.scoring import ScoringModel, Span, SpanScore, joined_score, rolling_windows, score_spans
from neox.evaluation.text_scores import grouped, read_lines
from neox.tokenizer import Tokenizer, positions

_LINES_AT_ONCE = 256
"""Lines among which batches of similar lengths are chosen."""
_PAIR = ("chosen", "rejected")


class _Line(NamedTuple):
    """A line of the input.

    Attributes:
        record: Its JSON object.
        texts: Texts whose log-probabilities are wanted, by their keys.
        windows: Windows that score the ids of each, after those of its context.
    """

    record: dict[str, Any]
    texts: dict[str, str]
    windows: list[list[Span]]


@dataclass
class TextSummary:
    """Statistics of the texts scored so far.

    Attributes:
        texts: Number of texts.
        tokens: Number of their tokens.
        size: UTF-8 bytes of the texts.
        log_probability: Natural logarithm, summed over the texts.
        pairs: Number of pairs.
        right: Number of pairs whose chosen text has the higher log-probability.
    """

    texts: int = 0
    tokens: int = 0
    size: int = 0
    log_probability: float = 0.0
    pairs: int = 0
    right: int = 0

    def __str__(self) -> str:
        loss = -self.log_probability
        text = f"{self.texts:,} texts, {self.tokens:,} tokens"
        if self.tokens:
            text += f", {loss / self.tokens:.4f} nats per token, {bits_per_byte(loss, self.size):.4f} bits per byte"
        if self.pairs:
            text += f"; pairs: {self.pairs:,}, accuracy {self.right / self.pairs:.4f}"
        return text


def lines_with_probabilities(
    model: ScoringModel,
    tokenizer: Tokenizer,
    paths: Sequence[str],
    summary: TextSummary,
    *,
    batch: int,
    skip_bad: int,
) -> Iterator[str]:
    """Score the texts in files, and yield each line with their log-probabilities as JSON.

    A line has a `text`, or a `completion`, or `chosen` and `rejected`, each of which may follow a `prompt`. Without one
    its first token follows the start of a text, and it may be longer than the model's context: it is scored in windows.
    The log-probabilities are those of lm-evaluation-harness's `loglikelihood`, and without a prompt those of its
    `loglikelihood_rolling`. All ranks of the model call it together.

    Args:
        model: The language model.
        tokenizer: Its tokenizer.
        paths: Files or directories.
        summary: Receives the numbers of all texts.
        batch: Number of texts in a forward pass.
        skip_bad: Number of bad lines that may be skipped, each with a warning.

    Raises:
        DataError: If there are more bad lines. It names the file and line of the first one.
    """

    def convert(record: Any) -> _Line:
        return _line(record, tokenizer, model.max_length)

    for lines in grouped(read_lines(paths, convert, skip_bad), _LINES_AT_ONCE):
        yield from _scored(model, lines, summary, batch)


def _line(record: Any, tokenizer: Tokenizer, max_length: int) -> _Line:
    """Return the texts of a line and their ids. Raises BadRecord."""
    texts: dict[str, str] = {}
    if isinstance(record, dict):
        for key in ("text", "completion", *_PAIR):
            if key in record:
                texts[key] = record[key]
    if tuple(texts) not in (("text",), ("completion",), _PAIR):
        raise BadRecord("a line has `text`, `completion`, or `chosen` and `rejected`, after a `prompt` if there is one")
    context = record.get("prompt", "")
    windows = []
    for key, text in {"prompt": context, **texts}.items():
        if not isinstance(text, str):
            raise BadRecord(f"`{key}` is no text; conversations are scored with a reward model (`train_impl: rm`)")
    for key, text in texts.items():
        ids, first = positions.scored(tokenizer, context, text)
        if len(ids) == first:
            raise BadRecord(f"`{key}` has no text")
        if len(ids) - 1 > max_length and context.strip():
            raise BadRecord(
                f"`{key}` with its prompt takes {len(ids) - 1:,} positions, of which the model has {max_length:,}: "
                "shorten the prompt; only texts without one are scored in windows"
            )
        windows.append(list(rolling_windows(Span(ids, first), max_length, max_length)))
    return _Line(record, texts, windows)


def _scored(model: ScoringModel, lines: Sequence[_Line], summary: TextSummary, batch: int) -> Iterator[str]:
    """Score lines, and yield them with their log-probabilities."""
    spans = [span for line in lines for windows in line.windows for span in windows]
    scores = iter(score_spans(model, spans, batch_size=batch))
    for line in lines:
        found: dict[str, SpanScore] = {}
        for (key, text), windows in zip(line.texts.items(), line.windows, strict=True):
            score = joined_score(islice(scores, len(windows)))
            found[key] = score
            summary.texts += 1
            summary.tokens += score.count
            summary.size += len(text.encode())
            summary.log_probability += score.log_probability
        more: dict[str, float] = {}
        if len(found) == 1:
            ((key, score),) = found.items()
            size = len(line.texts[key].encode())
            more = {"log_probability": score.log_probability, "tokens": score.count, "bytes": size}
            more["perplexity"] = perplexity_of(-score.log_probability / score.count)
            more["bits_per_byte"] = bits_per_byte(-score.log_probability, size)
        else:
            summary.pairs += 1
            chosen, rejected = found.values()
            summary.right += chosen.log_probability > rejected.log_probability
            for key, score in found.items():
                more |= {f"{key}_log_probability": score.log_probability, f"{key}_tokens": score.count}
        yield json.dumps({**line.record, **more}, ensure_ascii=False)
