"""Division of documents into sentences."""

from __future__ import annotations

import re
from collections.abc import Callable

from neox.errors import DataError, needs_package

LINES = "lines"
"""Instead of a language: each line is a sentence, as `tools/presplit_sentences.py` writes them."""


def sentence_splitter(language: str) -> Callable[[str], list[str]]:
    """Return the function that divides a text into sentences without white space around them.

    Args:
        language: Language of the rules, such as `en` or `zh`, or `lines`.

    Raises:
        DataError: If the language is no code of two or three letters, or the package is missing.
    """
    if language == LINES:
        return _lines
    if not re.fullmatch(r"[a-z]{2,3}", language):
        raise DataError(f"--language {language}: give a code of two or three letters, such as en, de or zh")
    with needs_package(DataError, "splitting sentences", "sentencex", "requirements-corpus.txt"):
        import sentencex

    def split(text: str) -> list[str]:
        return [stripped for sentence in sentencex.segment(language, text) if (stripped := sentence.strip())]

    return split


def _lines(text: str) -> list[str]:
    return [stripped for line in text.splitlines() if (stripped := line.strip())]
