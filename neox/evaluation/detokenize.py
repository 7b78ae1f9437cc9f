"""Wikitext's spaced-out tokens back to running text, by the rules usual for published scores.

`Valkyria Chronicles 3 @.@ 0 , and 's` becomes `Valkyria Chronicles 3.0, and's`. The order of the rules matters.
"""

from __future__ import annotations

import re

_NUMBERS = ((" @-@ ", "-"), (" @,@ ", ","), (" @.@ ", "."))
_PUNCTUATION = tuple((f" {mark} ", f"{mark} ") for mark in ":;.!?,")
_PAIRS = tuple(
    (re.compile(rf"{left}\s*([^{inside}]*?)\s*{right}"), rf"{open_}\1{close}")
    for left, inside, right, open_, close in (
        (r"\(", r"\)", r"\)", "(", ")"),
        (r"\[", r"\]", r"\]", "[", "]"),
        (r"{", r"}", r"}", "{", "}"),
        (r"\"", r"\"", r"\"", '"', '"'),
        (r"'", r"'", r"'", "'", "'"),
    )
)
_REST = (
    ("= = = =", "===="),
    ("= = =", "==="),
    ("= =", "=="),
    (" ° ", "°"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
)


def detokenize_wikitext(text: str) -> str:
    """Return `text` with numbers, punctuation, brackets, quotes and headings joined as people write them."""
    text = text.replace("s '", "s'")
    for old, new in (*_NUMBERS, *_PUNCTUATION):
        text = text.replace(old, new)
    for pattern, replacement in _PAIRS:
        text = pattern.sub(replacement, text)
    for old, new in _REST:
        text = text.replace(old, new)
    return text
