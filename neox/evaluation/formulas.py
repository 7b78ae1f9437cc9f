"""Perplexities from summed losses, as the field computes them on wikitext.

L: summed loss of the predicted tokens (natural log). T: tokens of the text, the first of which is not predicted.
O: words of the original text, by `split(" ")` of the stripped text.
"""

from __future__ import annotations

import math

_LARGEST_LOSS = 20.0  # a model that has learned nothing yet shows e^20, and no overflow


def token_perplexity(loss: float, tokens: int) -> float:
    """Return exp(min(20, L / (T - 1)))."""
    return math.exp(min(_LARGEST_LOSS, loss / (tokens - 1)))


def word_perplexity(loss: float, tokens: int, words: int) -> float:
    """Return exp(min(20, L / (T - 1) * (T - 1) / (O - 1))): per original word, which no tokenizer can flatter."""
    ratio = (tokens - 1) / (words - 1)
    return math.exp(min(_LARGEST_LOSS, loss / (tokens - 1) * ratio))


def bits_per_byte(loss: float, size: int) -> float:
    """Return the loss in bits per UTF-8 byte of the original text."""
    return loss / math.log(2) / size


def count_words(text: str) -> int:
    """Return O of the formulas above."""
    return len(text.strip().split(" "))
