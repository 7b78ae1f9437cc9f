"""Words and ends of sentences in any script, also in those that put no blanks between words."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import regex

# Scripts without blanks between words. Their words are about two characters long.
_BLANKLESS = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}ー々"
_HAS_BLANKLESS = regex.compile(rf"[{_BLANKLESS}]")
# The same words by Python's faster module, in texts of the Latin, Greek and Cyrillic letters without separate marks.
_PLAIN_WORD = re.compile(r"[^\W_]+(?:_+[^\W_]+)*")
_NOT_PLAIN = re.compile("[^\x00-\u02ff\u0370-\u0482\u048a-\u052f\u1e00-\u20cf\u2100-\u2bff]")
_WORD = regex.compile(
    rf"(?V1)[[\p{{L}}\p{{N}}]--[{_BLANKLESS}]]"
    rf"(?:[[\p{{L}}\p{{M}}\p{{N}}]--[{_BLANKLESS}]]|_+(?=[[\p{{L}}\p{{N}}]--[{_BLANKLESS}]]))*"
    rf"|[[\p{{L}}\p{{N}}]&&[{_BLANKLESS}]]\p{{M}}*"
)
SENTENCE_END = regex.compile(r"\p{Sentence_Terminal}|…")
"""End of a sentence in any script (Unicode's property)."""

# Characters that are not seen: soft hyphens, joiners, blanks without width, marks of direction.
_INVISIBLE = re.compile("[\u00ad\u034f\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u2064\ufeff]")
_CLUSTER = regex.compile(r"[\x00-\x7f]+(?![^\x00-\x7f])|\X")


def has_blanks(text: str) -> bool:
    """Return whether a text is in a script that puts blanks between words; a text of several scripts is not."""
    return _HAS_BLANKLESS.search(text) is None


def half_words(word: str) -> int:
    """Return the size of a word of `Words`: 2, or 1 for a character of a script without blanks."""
    return 1 if _HAS_BLANKLESS.match(word) else 2


@dataclass(frozen=True)
class Words:
    """Words of a text for comparisons: in lower case, without invisible characters, in one form of Unicode (NFKC).

    A word is a run of letters, marks and digits, with underscores inside. In scripts without blanks, it is a character.

    Attributes:
        words: The words.
        text: The text in which they are.
        starts: Place in the original text of each character of `text`; None if it is the same.
        ends: Place after it.
    """

    words: list[str]
    text: str
    starts: Sequence[int] | None = None
    ends: Sequence[int] | None = None

    @classmethod
    def of(cls, text: str) -> Words:
        """Return the words of a text."""
        if text.isascii():
            return cls(_PLAIN_WORD.findall(text.lower()), text.lower())
        if unicodedata.is_normalized("NFKC", text) and _INVISIBLE.search(text) is None:
            lowered = text.lower()
            if len(lowered) == len(text):
                return cls(_word_pattern(lowered).findall(lowered), lowered)
        parts: list[str] = []
        starts: list[int] = []
        ends: list[int] = []
        for cluster in _CLUSTER.finditer(text):
            start, end = cluster.span()
            part = cluster[0]
            if part.isascii():
                parts.append(part.lower())
                starts.extend(range(start, end))
                ends.extend(range(start + 1, end + 1))
                continue
            part = unicodedata.normalize("NFKC", _INVISIBLE.sub("", part)).lower().replace("i\u0307", "i")
            parts.append(part)
            starts.extend([start] * len(part))
            ends.extend([end] * len(part))
        normal = "".join(parts)
        return cls(_word_pattern(normal).findall(normal), normal, starts, ends)

    def spans(self) -> list[tuple[int, int]]:
        """Return the place of each word in the original text."""
        spans = [found.span() for found in _word_pattern(self.text).finditer(self.text)]
        if self.starts is None or self.ends is None:
            return spans
        return [(self.starts[start], self.ends[end - 1]) for start, end in spans]


def _word_pattern(text: str) -> Any:
    """Return the pattern of a word in a text."""
    return _WORD if _NOT_PLAIN.search(text) else _PLAIN_WORD


def text_words(text: str) -> list[str]:
    """Return the words of a text as rules of quality count them: between blanks, and each two characters without."""
    words: list[str] = []
    for word in text.split():
        if has_blanks(word):
            words.append(word)
        else:
            words += [word[start : start + 2] for start in range(0, len(word), 2)]
    return words
