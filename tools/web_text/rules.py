"""Rules on the quality of a text: Gopher's, C4's, and the fixes of OpenWebText's recipe.

Sources: Rae et al. 2021 (arXiv:2112.11446, appendix A.1.1 and table A1), Raffel et al. 2020 (arXiv:1910.10683, section
2.2), and the tasks of Megatron-LM's `cleanup_fix_dataset.py`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence

import regex

from tools.web_text.words import SENTENCE_END, has_blanks, text_words

_STOP_WORDS = frozenset({"the", "be", "to", "of", "and", "that", "have", "with"})
_BULLETS = ("\u2022", "\u2023", "\u25cf", "\u25aa", "\u25e6", "-", "*")
_ELLIPSES = ("...", "\u2026")
_TOP_NGRAMS = {2: 0.20, 3: 0.18, 4: 0.16}
_REPEATED_NGRAMS = {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10}
_LONGEST_WORDS = 100_000

_C4_QUOTES = ('"', "\u201d", "\u300d", "\u300f", "\u00bb")
_C4_POLICY = (
    "terms of use",
    "privacy policy",
    "cookie policy",
    "uses cookies",
    "use of cookies",
    "use cookies",
)
_C4_WORDS_OF_LINE = 5
_C4_SENTENCES = 3
_CITATION = re.compile(r"\[(?:\d+|edit|citation needed)\]", re.IGNORECASE)
_SENTENCE = re.compile(r"[.!?]+[\"'\u201d\u2019)]*(?=\s|$)")
_OTHER_SENTENCE = regex.compile(r"(?V1)[\p{Sentence_Terminal}--[\x00-\x7f]]+")  # no blank follows in Chinese
_SPACES = re.compile(r"  +|\b\n+ |\b\n+")


def gopher_quality(text: str, stop_words: frozenset[str] = _STOP_WORDS) -> str | None:
    """Return the name of the first of Gopher's quality rules that a text breaks; None if it keeps all.

    Args:
        text: The text. In scripts without blanks two characters are a word.
        stop_words: Words of its language, in lower case, of which it must have two.
    """
    words = text_words(text)
    if not 50 <= len(words) <= _LONGEST_WORDS:
        return "gopher: number of words"
    with_blanks = list(filter(has_blanks, words))
    mean = sum(map(len, with_blanks)) / max(len(with_blanks), 1)
    if 2 * len(with_blanks) > len(words) and not 3 <= mean <= 10:
        return "gopher: mean length of words"
    ellipses = sum(map(text.count, _ELLIPSES))
    if max(text.count("#"), ellipses) / len(words) > 0.1:
        return "gopher: symbols for words"
    lines = list(filter(None, map(str.strip, text.splitlines())))
    if sum(line.startswith(_BULLETS) for line in lines) > 0.9 * len(lines):
        return "gopher: lines that start with a bullet"
    if sum(line.endswith(_ELLIPSES) for line in lines) > 0.3 * len(lines):
        return "gopher: lines that end with an ellipsis"
    with_letters = sum(any(map(str.isalpha, word)) for word in words)
    if with_letters < 0.8 * len(words):
        return "gopher: words without a letter"
    distinct = {word.strip(".,;:!?\"'()").lower() for word in words}
    found = stop_words & distinct
    for word in stop_words - distinct:
        if not has_blanks(word) and word in text:
            found |= {word}
    if len(found) < 2:
        return "gopher: stop words"
    return None


def gopher_repetition(text: str) -> str | None:
    """Return the name of the first of Gopher's repetition rules that a text breaks; None if it keeps all."""
    for name, pattern in (("lines", r"\n+"), ("paragraphs", r"\n{2,}")):
        pieces = list(filter(None, re.split(pattern, text.strip())))
        seen: set[str] = set()
        repeated = []  # pieces that have occurred before
        for piece in pieces:
            if piece in seen:
                repeated.append(piece)
            seen.add(piece)
        if len(repeated) > 0.3 * len(pieces):
            return f"gopher: repeated {name}"
        if sum(map(len, repeated)) > 0.2 * len(text):
            return f"gopher: characters in repeated {name}"
    words = text_words(text)[:_LONGEST_WORDS]
    size = sum(map(len, words))
    for n, share in _TOP_NGRAMS.items():
        if _characters_of_the_most_frequent(words, n) > share * size:
            return f"gopher: the most frequent {n}-gram"
    for n, share in _REPEATED_NGRAMS.items():
        if _repeated_characters(words, n) > share * size:
            return f"gopher: repeated {n}-grams"
    return None


def _characters_of_the_most_frequent(words: Sequence[str], n: int) -> int:
    """Return the number of characters in all occurrences of the most frequent n-gram; 0 if it occurs once."""
    ngrams = Counter(" ".join(words[i : i + n]) for i in range(len(words) - n + 1))
    if not ngrams:
        return 0
    ((top, count),) = ngrams.most_common(1)
    spaces = n - 1
    return (len(top) - spaces) * count if count > 1 else 0


def _repeated_characters(words: Sequence[str], n: int) -> int:
    """Return the number of characters in n-grams that have occurred before; each word counts once."""
    seen: set[str] = set()
    last = 0  # word after the last that is counted
    total = 0
    for i in range(len(words) - n + 1):
        ngram = " ".join(words[i : i + n])
        if ngram in seen:
            start = max(i, last)
            total += sum(map(len, words[start : i + n]))
            last = i + n
        seen.add(ngram)
    return total


def c4_lines(text: str) -> tuple[str, str | None]:
    """Apply C4's rules.

    Args:
        text: A text whose lines are paragraphs.

    Returns:
        The text of the lines that C4 keeps, and the name of the rule that drops the text, or None.
    """
    lowered = text.lower()
    if "lorem ipsum" in lowered:
        return text, "c4: lorem ipsum"
    if "{" in text:
        return text, "c4: curly bracket"
    kept = []
    for line in text.splitlines():
        line = _CITATION.sub("", line).strip()
        ends = line.endswith(_C4_QUOTES) or SENTENCE_END.fullmatch(line[-1:])
        if not ends or line.endswith(_ELLIPSES) or len(text_words(line)) < _C4_WORDS_OF_LINE:
            continue
        lowered = line.lower()
        if "javascript" not in lowered and not any(phrase in lowered for phrase in _C4_POLICY):
            kept.append(line)
    result = "\n".join(kept)
    if len(_SENTENCE.findall(result)) + len(_OTHER_SENTENCE.findall(result)) < _C4_SENTENCES:
        return text, "c4: number of sentences"
    return result, None


def word_pattern(words: Sequence[str]) -> re.Pattern[str] | None:
    """Return the pattern that finds any of some words or phrases; None without any.

    As in C4, a word of a script without blanks is also found inside of others.
    """
    parts = []
    for word in sorted(words, key=len, reverse=True):
        if has_blanks(word):
            parts.append(rf"(?<!\w){re.escape(word)}(?!\w)")
        else:
            parts.append(re.escape(word))
    if not parts:
        return None
    return re.compile("|".join(parts), re.IGNORECASE)


def old_fix(name: str, text: str, language_of: Callable[[str], str], fix: Callable[[str], str]) -> tuple[str, bool]:
    """Apply one of the tasks of the old recipe.

    Args:
        name: Its name there.
        text: The text.
        language_of: Detector of a language.
        fix: `ftfy.fix_text`.

    Returns:
        The text, perhaps changed, and whether it is dropped.
    """
    if name == "remove_512":
        return text, len(text) < 512
    if name == "remove_256_javascript":
        return text, len(text) < 256 and "javascript" in text.lower()
    if name == "remove_512_non_english":
        return text, len(text) < 512 and language_of(text) != "en"
    if name == "ftfy_fix_text":
        return fix(text), False
    assert name == "general_cleaning"
    return _SPACES.sub(" ", text), False
