"""Perplexity of wikitext as Megatron-LM defines it, and of documents and token files as lm-evaluation-harness does.

| of | wikitext (Megatron-LM) | documents (lm-evaluation-harness) |
|---|---|---|
| predicted | all tokens of the file but the first | all tokens of each document, but not its end |
| windows | `scoring.windows` | `scoring.rolling_windows` |
| words O | between single blanks, of the original text | between blanks and line ends, as in `wc -w` |
| perplexity per word | exp(L / (O - 1)) | exp(L / O) |

L is the summed loss of the predicted tokens (natural logarithm).
"""

from __future__ import annotations

import re
from itertools import islice
from pathlib import Path

import numpy as np

from neox.errors import EvaluationError
from neox.evaluation.results import TaskResult, bits_per_byte, perplexity_of
from neox.evaluation.scoring import Scorer, Span, joined_score, windows
from neox.evaluation.tasks import is_token_file, read_corpus, read_text, token_documents
from neox.tokenizer import positions

# The following rules turn wikitext's tokenized text back into running text. They are usual for published scores, and
# their order matters.
_REPLACEMENTS = (
    ("s '", "s'"),
    (" @-@ ", "-"),
    (" @,@ ", ","),
    (" @.@ ", "."),
    (" : ", ": "),
    (" ; ", "; "),
    (" . ", ". "),
    (" ! ", "! "),
    (" ? ", "? "),
    (" , ", ", "),
)
_BRACKETS_AND_QUOTES = (
    (re.compile(r"\(\s*([^\)]*?)\s*\)"), r"(\1)"),
    (re.compile(r"\[\s*([^\]]*?)\s*\]"), r"[\1]"),
    (re.compile(r"{\s*([^}]*?)\s*}"), r"{\1}"),
    (re.compile(r"\"\s*([^\"]*?)\s*\""), r'"\1"'),
    (re.compile(r"'\s*([^']*?)\s*'"), r"'\1'"),
)
_FINAL_REPLACEMENTS = (
    ("= = = =", "===="),
    ("= = =", "==="),
    ("= =", "=="),
    (" ° ", "°"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
)
_TITLE = re.compile(r"^ ?= [^=\n]+ = ?$", re.MULTILINE)


def adjusted_perplexity(loss: float, words: int) -> float:
    """Return exp(L / (O - 1)), Megatron-LM's adjusted perplexity, which divides by the words after the first.

    Megatron-LM writes exp(L / (T - 1) * (T - 1) / (O - 1)), where T is the number of tokens.
    """
    return perplexity_of(loss / (words - 1))


def wikitext_words(text: str) -> int:
    """Return O as Megatron-LM counts it: wikitext's words stand between single blanks, and so do its line ends."""
    return len(text.strip().split(" "))


def detokenize_wikitext(text: str) -> str:
    """Return tokenized wikitext as running text: `3 @.@ 0 , and 's` becomes `3.0, and's`."""
    for old, new in _REPLACEMENTS:
        text = text.replace(old, new)
    for pattern, replacement in _BRACKETS_AND_QUOTES:
        text = pattern.sub(replacement, text)
    for old, new in _FINAL_REPLACEMENTS:
        text = text.replace(old, new)
    return text


def first_articles(text: str, limit: int | None) -> str:
    """Return the first articles of a file in wikitext's format. Titles have the form ` = Title = `.

    Args:
        text: Content of the file.
        limit: Number of articles; None for all.
    """
    if limit is None:
        return text
    for number, title in enumerate(_TITLE.finditer(text)):
        if number == limit:
            return text[: title.start()]
    return text


def wikitext(path: str | Path, scorer: Scorer, name: str = "wikitext") -> TaskResult:
    """Score a file in wikitext's format as one detokenized text. The scorer's limit counts its articles.

    Returns:
        `ppl` (per token), `word_ppl` (Megatron-LM's adjusted perplexity), `loss` and `bits_per_byte`.

    Raises:
        EvaluationError: For a file with too little text.
    """
    original = first_articles(read_text(path), scorer.limit)
    words = wikitext_words(original)
    tokens = positions.document(scorer.tokenizer, detokenize_wikitext(original))
    if len(tokens) < 2 or words < 2:
        raise EvaluationError(f"{path}: {words} words and {len(tokens)} tokens are too few for a perplexity")
    spans = list(windows(tokens, scorer.window, scorer.stride or scorer.window))
    score = joined_score(scorer.score(spans, name))
    loss = -score.log_probability
    scored = score.count
    size = len(original.encode())
    metrics = {
        "ppl": perplexity_of(loss / scored),
        "word_ppl": adjusted_perplexity(loss, words),
        "loss": loss / scored,
        "bits_per_byte": bits_per_byte(loss, size),
    }
    return TaskResult(name, metrics, {"tokens": len(tokens), "scored": scored, "words": words, "bytes": size})


def corpus_perplexity(path: str | Path, scorer: Scorer, name: str = "perplexity") -> TaskResult:
    """Score documents (`.jsonl`, `.jsonl.zst`, `.txt`, ...) or a token file (the prefix of its `.bin` and `.idx`).

    The scores are those of lm-evaluation-harness's `loglikelihood_rolling`: each document is a separate text, whose
    tokens are all predicted, the first one after what stands before the first token of a text. The end of a document is
    not predicted. A token file gives the same scores as its documents, except those that need the text (`word_ppl`,
    `byte_ppl`, `bits_per_byte`).

    Returns:
        `ppl` and `loss` (per token), `word_ppl` (exp(L / O)), `byte_ppl` and `bits_per_byte`.

    Raises:
        EvaluationError: If there is nothing to score.
        DataError: For broken files.
    """
    tokenizer = scorer.tokenizer
    texts: list[Span] = []
    counts: dict[str, int] = {}
    if is_token_file(path):
        first = len(positions.before_first(tokenizer))
        for ids in islice(token_documents(path, tokenizer), scorer.limit):
            texts.append(Span(ids, first))
    else:
        documents = list(islice(read_corpus(path), scorer.limit))
        for text in positions.scored_documents(tokenizer, documents):
            texts.append(Span(np.array(text.ids, dtype=np.int32), text.first))
        counts = {"words": 0, "bytes": 0}
        for document in documents:
            counts["words"] += len(document.split())
            counts["bytes"] += len(document.encode())
    score = joined_score(scorer.rolling(texts, name))
    if not score.count:
        raise EvaluationError(f"{path}: its documents have no tokens")
    loss = -score.log_probability
    metrics = {"ppl": perplexity_of(loss / score.count), "loss": loss / score.count}
    if counts.get("words"):
        metrics["word_ppl"] = perplexity_of(loss / counts["words"])
    if counts.get("bytes"):
        metrics["byte_ppl"] = perplexity_of(loss / counts["bytes"])
        metrics["bits_per_byte"] = bits_per_byte(loss, counts["bytes"])
    return TaskResult(name, metrics, {"documents": len(texts), "scored": score.count, **counts})
