"""LAMBADA: the last word of a passage that only the whole passage tells (Paperno et al. 2016, arXiv:1606.06031)."""

from __future__ import annotations

import math
from pathlib import Path

from neox.evaluation.perplexity import Scoring
from neox.evaluation.result import TaskResult
from neox.evaluation.scoring import Span
from neox.evaluation.texts import read_passages
from neox.generation import over_replicas
from neox.tokenizer import Tokenizer


def lambada(path: str | Path, scoring: Scoring, name: str = "lambada") -> TaskResult:
    """Score passages: `.jsonl` with `text`, or plain text with one a line.

    `acc`: the last token is the most probable one (non-strict). `strict_acc`: every token of the last word
    (`text.split()[-1]`) is. `ppl`: of the last word. Passages longer than the context lose their beginning, and are
    counted. Raises EvaluationError for a file without passages.
    """
    passages = list(read_passages(path))
    ends = [last_token(text, scoring.tokenizer) for text in passages]
    words = [last_word(text, scoring.tokenizer) for text in passages]
    longest = scoring.model.max_length
    spans = [fit(span, longest) for span in (*ends, *words)]
    truncated = sum(len(span.tokens) - 1 > longest for span in words)
    scores = over_replicas(spans, lambda mine: scoring.score(mine, name), scoring.grid)
    of_tokens, of_words = scores[: len(passages)], scores[len(passages) :]
    loss = -sum(score.log_probability for score in of_words) / len(passages)
    metrics = {
        "acc": sum(score.greedy for score in of_tokens) / len(passages),
        "strict_acc": sum(score.greedy for score in of_words) / len(passages),
        "ppl": math.exp(min(20.0, loss)),
    }
    return TaskResult(name, metrics, {"passages": len(passages), "truncated": truncated})


def last_token(text: str, tokenizer: Tokenizer) -> Span:
    """Return the passage with its last token to be predicted."""
    tokens = tokenizer.encode(text.strip())
    if len(tokens) == 1:
        tokens = [tokenizer.eod, *tokens]
    return Span(tuple(tokens), len(tokens) - 1)


def last_word(text: str, tokenizer: Tokenizer) -> Span:
    """Return the passage with its last word to be predicted, the word encoded by itself after a space."""
    word = text.split()[-1]
    context = tokenizer.encode(text[: text.rfind(word)].strip()) or [tokenizer.eod]
    return Span((*context, *tokenizer.encode(f" {word}")), len(context))


def fit(span: Span, longest: int) -> Span:
    """Drop the beginning of a span that is longer than the context."""
    drop = max(0, len(span.tokens) - 1 - longest)
    return Span(span.tokens[drop:], max(1, span.first - drop))
