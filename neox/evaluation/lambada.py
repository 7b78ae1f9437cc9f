"""LAMBADA: predicting the last word of a passage (Paperno et al. 2016, arXiv:1606.06031)."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from neox.evaluation.results import TaskResult, perplexity_of
from neox.evaluation.scoring import Scorer, Span
from neox.evaluation.tasks import read_passages
from neox.tokenizer import Tokenizer, positions


def lambada(path: str | Path, scorer: Scorer, name: str = "lambada") -> TaskResult:
    """Score the last words of passages.

    Args:
        path: `.jsonl` with the key `text`, or plain text with one passage per line.
        scorer: Model and settings. Passages longer than the context are cut at their beginning and counted.
        name: Name of the task in the result.

    Returns:
        `acc`: fraction of passages whose last token is the most probable one (non-strict). `strict_acc`: fraction of
        passages whose last word (`text.split()[-1]`) has only most probable tokens. `ppl`: perplexity of the last word.

    Raises:
        EvaluationError: For a file without passages.
    """
    longest = scorer.model.max_length
    tokens = []
    words = []
    truncated = 0
    for text in islice(read_passages(path), scorer.limit):
        with_last_word = last_word(text, scorer.tokenizer)
        truncated += len(with_last_word.tokens) - 1 > longest
        words.append(truncate(with_last_word, longest))
        tokens.append(truncate(last_token(text, scorer.tokenizer), longest))
    count = len(words)
    scores = scorer.score([*tokens, *words], name)
    token_hits = 0
    word_hits = 0
    loss = 0.0
    for token, word in zip(scores[:count], scores[count:], strict=True):
        token_hits += token.greedy
        word_hits += word.greedy
        loss -= word.log_probability
    metrics = {
        "acc": token_hits / count,
        "strict_acc": word_hits / count,
        "ppl": perplexity_of(loss / count),
    }
    return TaskResult(name, metrics, {"passages": count, "truncated": truncated})


def last_token(text: str, tokenizer: Tokenizer) -> Span:
    """Return a span with the last token of a passage scored."""
    tokens = positions.document(tokenizer, text.strip())
    if len(tokens) == 1:
        tokens = [*positions.before_first(tokenizer), *tokens]
    return Span(tuple(tokens), len(tokens) - 1)


def last_word(text: str, tokenizer: Tokenizer) -> Span:
    """Return a span with the last word of a passage scored, after a space."""
    word = text.split()[-1]
    return Span(*positions.scored(tokenizer, text[: text.rfind(word)].strip(), f" {word}"))


def truncate(span: Span, longest: int) -> Span:
    """Drop the beginning of a span of more than `longest` predicted tokens."""
    drop = max(0, len(span.tokens) - 1 - longest)
    return Span(span.tokens[drop:], max(1, span.first - drop))
