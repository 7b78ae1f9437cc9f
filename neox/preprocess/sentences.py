"""Division of documents into sentences."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from neox.errors import DataError, needs_package

LINES = "lines"
"""Name to give instead of a language: each line is a sentence, as `tools/presplit_sentences.py` writes them."""


def sentence_splitter(language: str) -> Callable[[str], list[str]]:
    """Return a function that divides a text into sentences, without white space around them.

    Args:
        language: Language that determines the rules, such as `en` or `zh`, or LINES.

    Raises:
        DataError: If the language is not a code of two or three letters, or the package is not installed.
    """
    if language == LINES:
        return lambda text: _stripped(text.splitlines())
    if not re.fullmatch(r"[a-z]{2,3}", language):
        raise DataError(f"--language {language}: give a code of two or three letters, such as en, de or zh")
    with needs_package(DataError, "splitting sentences", "sentencex", "requirements-corpus.txt"):
        import sentencex

    return lambda text: _stripped(sentencex.segment(language, text))


def _stripped(sentences: Iterable[str]) -> list[str]:
    """Return sentences without white space around them, except empty ones."""
    stripped = (sentence.strip() for sentence in sentences)
    return [sentence for sentence in stripped if sentence]
