"""Whether two keys, or two words that a key takes, are spellings of one name: looking alike is not enough."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from neox.config.keys import ALIASES, NEOX_KEYS

_FILLERS = frozenset({"num", "size", "use", "of", "the"})
"""Words that change nothing about what a key names."""
_NO_TYPO = 3  # letters; a word of at most so many letters is another word if one of them differs


def means_the_same(unknown: str, known: str) -> bool:
    """Return whether an unknown key, or value, is a misspelling of a known one.

    Each word must be the same word, in the plural, or a word that no key has and that differs by a slip of the
    keyboard. So `rotary_interleaved` is not `rotary_emb_base`, and `moe_type` is not `mlp_type`.
    """
    known = known.lower()
    if unknown.replace("_", "").lower() == known.replace("_", ""):
        return True
    words = unknown.lower().split("_")
    others = known.split("_")
    return _are_same_words(words, others) or _are_same_words(_without_fillers(words), _without_fillers(others))


def _are_same_words(words: Sequence[str], others: Sequence[str]) -> bool:
    return len(words) == len(others) and all(map(_is_same_word, words, others))


def _without_fillers(words: Sequence[str]) -> Sequence[str]:
    """Return words without fillers, or all of them if there are no others."""
    return [word for word in words if word not in _FILLERS] or words


def _is_same_word(word: str, other: str) -> bool:
    if word == other or word.removesuffix("s") == other.removesuffix("s"):
        return True
    if word in _vocabulary():
        return False
    if max(len(word), len(other)) <= _NO_TYPO:
        return sorted(word) == sorted(other)
    if [letter for letter in word if letter.isdigit()] != [letter for letter in other if letter.isdigit()]:
        return False
    allowed = 1 if len(other) <= 6 else 2
    return abs(len(word) - len(other)) <= allowed and _edits(word, other) <= allowed


@cache
def _vocabulary() -> frozenset[str]:
    """Return the words of all keys of the table and of aliases."""
    return frozenset(word for key in (*NEOX_KEYS, *ALIASES) for word in key.split("_"))


def _edits(word: str, other: str) -> int:
    """Return how many letters are changed, missing, additional, or swapped with a neighbour."""
    rows = [list(range(len(other) + 1))]
    for row, letter in enumerate(word, start=1):
        line = [row]
        for column, target in enumerate(other, start=1):
            cost = min(rows[-1][column] + 1, line[-1] + 1, rows[-1][column - 1] + (letter != target))
            swapped = row > 1 and column > 1 and letter == other[column - 2] and word[row - 2] == target
            if swapped:
                cost = min(cost, rows[-2][column - 2] + 1)
            line.append(cost)
        rows.append(line)
    return rows[-1][-1]
