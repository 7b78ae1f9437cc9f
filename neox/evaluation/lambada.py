"""LAMBADA: predicting the last word of a passage (Paperno et al. 2016, arXiv:1606.06031)."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from neox.evaluation.results import TaskResult, perplexity_of
from neox.evaluation.scoring import Scorer, Span
from neox.evaluation.tasks import read_passages
from neox.tokenizer import Tokenizer


def lambada(path: str | Path, scorer: Scorer, name: str = "lambada") -> TaskResult:
    """Score the last words of passages.

    Args:
        path: `.jsonl` with the key `text`, or plain text with one passage per line.
        scorer: Model and settings; passages longer than the context are cut at their beginning and counted.
        name: Name of the task in the result.

    Returns:
        `acc`: fraction of passages whose last token is the most probable one (non-strict). `strict_acc`: whose last
        word (`text.split()[-1]`) has only most probable tokens. `ppl`: perplexity of the last word.

    Raises:
        EvaluationError: For a file without passages.
    """
    passages = list(islice(read_passages(path), scorer.limit))
    tokens = [last_token(text, scorer.tokenizer) for text in passages]
    words = [last_word(text, scorer.tokenizer) for text in passages]
    longest = scorer.model.max_length
    scores = scorer.score([truncate(span, longest) for span in (*tokens, *words)], name)
    token_scores, word_scores = scores[: len(passages)], scores[len(passages) :]
    loss = -sum(score.log_probability for score in word_scores) / len(passages)
    metrics = {
        "acc": sum(score.greedy for score in token_scores) / len(passages),
        "strict_acc": sum(score.greedy for score in word_scores) / len(passages),
        "ppl": perplexity_of(loss),
    }
    truncated = sum(len(span.tokens) - 1 > longest for span in words)
    return TaskResult(name, metrics, {"passages": len(passages), "truncated": truncated})


def last_token(text: str, tokenizer: Tokenizer) -> Span:
    """Return a passage of which the last token is scored."""
    tokens = tokenizer.encode(text.strip())
    if len(tokens) == 1:
        tokens = [tokenizer.eod, *tokens]
    return Span(tuple(tokens), len(tokens) - 1)


def last_word(text: str, tokenizer: Tokenizer) -> Span:
    """Return a passage of which the last word is scored, encoded separately and after a space."""
    word = text.split()[-1]
    context = tokenizer.encode(text[: text.rfind(word)].strip()) or [tokenizer.eod]
    return Span((*context, *tokenizer.encode(f" {word}")), len(context))


def truncate(span: Span, longest: int) -> Span:
    """Drop the beginning of a span of more than `longest` predicted tokens."""
    drop = max(0, len(span.tokens) - 1 - longest)
    return Span(span.tokens[drop:], max(1, span.first - drop))
