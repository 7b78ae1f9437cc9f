"""Perplexity of wikitext, of a corpus of documents and of token files.

In the formulas, L is the summed loss of the predicted tokens (natural logarithm). T is the number of tokens of a text,
the first of which is not predicted. O is the number of words of the original text, `len(text.strip().split(" "))`.
"""

from __future__ import annotations

import re
from itertools import islice
from pathlib import Path

import numpy as np

from neox.errors import EvaluationError
from neox.evaluation.results import TaskResult, bits_per_byte, perplexity_of
from neox.evaluation.scoring import Scorer, TokenIds
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


def token_perplexity(loss: float, tokens: int) -> float:
    """Return exp(L / (T - 1))."""
    return perplexity_of(loss / (tokens - 1))


def word_perplexity(loss: float, tokens: int, words: int) -> float:
    """Return exp(L / (T - 1) * (T - 1) / (O - 1)), which does not depend on the tokenizer.

    Megatron-LM's adjusted perplexity, which divides by the words after the first. One sentence of a few words therefore
    has a higher one than exp(L / O).
    """
    tokens_per_word = (tokens - 1) / (words - 1)
    return perplexity_of(loss / (tokens - 1) * tokens_per_word)


def count_words(text: str) -> int:
    """Return O of the formulas."""
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
        `ppl` (per token), `word_ppl` (per word of the original file), `loss` and `bits_per_byte`.

    Raises:
        EvaluationError: For a file with too little text.
    """
    original = first_articles(read_text(path), scorer.limit)
    words = count_words(original)
    tokens = positions.document(scorer.tokenizer, detokenize_wikitext(original))
    if len(tokens) < 2 or words < 2:
        raise EvaluationError(f"{path}: {words} words and {len(tokens)} tokens are too few for a perplexity")
    loss, scored = scorer.loss([tokens], name)
    size = len(original.encode())
    metrics = {
        "ppl": token_perplexity(loss, len(tokens)),
        "word_ppl": word_perplexity(loss, len(tokens), words),
        "loss": loss / scored,
        "bits_per_byte": bits_per_byte(loss, size),
    }
    return TaskResult(name, metrics, {"tokens": len(tokens), "scored": scored, "words": words, "bytes": size})


def corpus_perplexity(path: str | Path, scorer: Scorer, name: str = "perplexity") -> TaskResult:
    """Score documents (`.jsonl`, `.jsonl.zst`, `.txt`, ...) or a token file (the prefix of its `.bin` and `.idx`).

    Each document is a separate text between two end-of-document tokens, so that every token of it is predicted, as in
    training. What the tokenizer writes before a text (`<s>`) stands in place of the first one, and is not predicted. A
    token file made with `--append-eod` gives the same scores as its documents, except those that need the text
    (`word_ppl`, `bits_per_byte`).

    Raises:
        EvaluationError: If there is nothing to score.
        DataError: For broken files.
    """
    texts: list[TokenIds] = []
    counts: dict[str, int] = {}
    if is_token_file(path):
        texts += islice(token_documents(path, scorer.tokenizer), scorer.limit)
    else:
        documents = list(islice(read_corpus(path), scorer.limit))
        eod = scorer.tokenizer.eod
        before = () if scorer.tokenizer.before_text else (eod,)
        for ids in positions.documents(scorer.tokenizer, documents):
            texts.append(np.array([*before, *ids, eod], dtype=np.int32))
        counts["words"] = sum(map(count_words, documents))
        counts["bytes"] = sum(len(text.encode()) for text in documents)
    loss, scored = scorer.loss(texts, name)
    metrics = {"ppl": token_perplexity(loss, scored + 1), "loss": loss / scored}
    if counts.get("words", 0) > 1:
        metrics["word_ppl"] = word_perplexity(loss, scored + 1, counts["words"])
        metrics["bits_per_byte"] = bits_per_byte(loss, counts["bytes"])
    return TaskResult(name, metrics, {"documents": len(texts), "scored": scored, **counts})
