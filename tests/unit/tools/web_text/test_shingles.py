"""Character 5-grams, exact similarities, and signatures in bands."""

from __future__ import annotations

import random

import numpy as np
import pytest

from neox.errors import ConfigError
from tests.errors import raises_naming
from tools.web_text.signatures import (
    OLD_BANDS,
    SIMILARITIES,
    Bands,
    band_hashes,
    bands_for,
    narrow_set,
    shingles_of_texts,
    similarity,
    wide_set,
)

ALPHABETS = ("ab", "abcdé ", "a字中ß", "🙂a\U0010ffff")


def grams(text: str) -> set[str]:
    text = text.ljust(5, "\0")
    return {text[i : i + 5] for i in range(len(text) - 4)}


@pytest.mark.parametrize("kind", SIMILARITIES)
def test_similarity_is_that_of_sets_of_strings(kind: str) -> None:
    rng = random.Random(3)
    size = {"union": lambda a, b: len(a | b), "min": lambda a, b: min(len(a), len(b))}
    for _ in range(400):
        a, b = ("".join(rng.choices(rng.choice(ALPHABETS), k=rng.randrange(40))) for _ in range(2))
        b = rng.choice([b, a[:-3] + b, a])
        first, second = grams(a), grams(b)
        divisor = size.get(kind, lambda a, b: max(len(a), len(b)))(first, second)
        assert similarity(a, b, kind) == len(first & second) / divisor


def test_distinct_grams_have_distinct_numbers() -> None:
    rng = random.Random(5)
    texts = ["".join(rng.choices("".join(ALPHABETS), k=300)) for _ in range(30)]
    ids, starts = shingles_of_texts(texts)
    assert starts.tolist() == [300 * n for n in range(31)]
    numbers: dict[str, int] = {}
    for n, text in enumerate(texts):
        for place in range(296):
            assert numbers.setdefault(text[place : place + 5], ids[300 * n + place]) == ids[300 * n + place]
    assert len(set(numbers.values())) == len(numbers)


def test_a_repeated_gram_counts_once_and_short_texts_are_grams() -> None:
    assert len(narrow_set("a" * 100_000)) == len(wide_set("a" * 100_000)) == 1
    assert similarity("a" * 9, "a" * 1000) == 1
    assert similarity("abc", "abc") == 1
    assert similarity("abc", "abd") == 0


def test_hashes_of_a_text_do_not_depend_on_the_others() -> None:
    texts = ["one text of some length", "字中文 text", "ab", "a" * 50]
    bands = bands_for(0.9)
    together = band_hashes(texts, bands, 1)
    assert together.shape == (4, bands.count)
    assert np.array_equal(together, np.concatenate([band_hashes([text], bands, 1) for text in texts]))
    assert not np.any(together == band_hashes(texts, bands, 2))
    assert len(set(together.ravel().tolist())) == together.size


@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0])
def test_bands_find_nearly_all_pairs_at_the_threshold(threshold: float) -> None:
    bands = bands_for(threshold)
    assert bands.recall(threshold) >= 0.99
    stricter = Bands(128 // (bands.rows + 1), bands.rows + 1) if bands.rows < 128 else None
    assert stricter is None or stricter.recall(threshold) < 0.99


def test_old_bands_and_thresholds_that_are_too_low() -> None:
    assert OLD_BANDS.recall(0.9) == pytest.approx(0.986, abs=5e-4)
    assert OLD_BANDS.recall(0.7) == pytest.approx(0.249, abs=5e-4)
    with raises_naming(ConfigError, "--threshold"):
        bands_for(0.01)
