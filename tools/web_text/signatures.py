"""Similarity of texts: character 5-grams, MinHash signatures in bands, and the exact similarity of two texts.

    text      "To be, or"
    5-grams   "To be" "o be," " be, " "be, o" "e, or"      a set; the similarity of two texts is that of their sets
        |  MinHash: 128 numbers, each of which two texts share with the probability of their similarity
        v
    bands     [ 1 .. rows ][ rows+1 .. 2 rows ] ...         texts that share the hash of a band are candidates
        |  `similarity`: their 5-grams are compared
        v
    near-duplicates

If all five code points of a 5-gram are below 4096, the 5-gram is their 60 bits as a number. Other 5-grams (Chinese,
emoji) are wide: signatures use a hash of them, and the exact similarity compares their code points.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from neox.errors import ConfigError

PERMUTATIONS = 128
RECALL = 0.99
NGRAM = 5
_BITS = 12  # of a code point in a packed 5-gram
_WIDE = np.uint64(1 << 63)  # marks a 5-gram that is hashed
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_CHUNK = 1 << 13  # 5-grams at a time, so that temporary arrays stay in the cache

Ids = NDArray[np.uint64]


def code_points(text: str) -> NDArray[np.uint32]:
    """Return the code points of a text [characters]; a text shorter than five characters is padded with NUL."""
    return np.frombuffer(text.ljust(NGRAM, "\0").encode("utf-32-le"), dtype="<u4")


def shingles_of_texts(texts: Sequence[str]) -> tuple[Ids, Ids]:
    """Return the 5-grams of several texts, one for each character, in one array.

    No 5-gram starts at the last four characters of a text. Their places repeat the text's first 5-gram, which does not
    change its signature.

    Returns:
        The 5-grams of all texts [characters]; the start of each text, and the end of the last one [texts + 1].
    """
    padded = [text.ljust(NGRAM, "\0") for text in texts]
    starts = np.zeros(len(texts) + 1, dtype=np.uint64)
    np.cumsum([len(text) for text in padded], out=starts[1:])
    ids = _packed(code_points("".join(padded) + "\0" * (NGRAM - 1)))
    for back in range(1, NGRAM):
        ids[starts[1:] - np.uint64(back)] = ids[starts[:-1]]
    return ids, starts


def _packed(codes: NDArray[np.uint32]) -> Ids:
    """Return the 5-gram that starts at each code point, except the last four."""
    count = len(codes) - NGRAM + 1
    ids = np.empty(max(count, 0), dtype=np.uint64)
    for start in range(0, count, _CHUNK):
        stop = min(start + _CHUNK, count)
        c = codes[start : stop + NGRAM - 1].astype(np.uint64)
        two = c[:-1] << np.uint64(_BITS)
        two |= c[1:]
        four = two[:-2] << np.uint64(2 * _BITS)
        four |= two[2:]
        five = ids[start:stop]
        np.left_shift(four[:-1], np.uint64(_BITS), out=five)
        five |= c[4:]
        if c.max() >> np.uint64(_BITS):
            wide = c >> np.uint64(_BITS) != 0
            # A 63-bit hash of the 5-gram at each position; its highest bit marks it as a hash.
            value = c[: 1 - NGRAM].copy()
            for offset in range(1, NGRAM):
                value *= _FACTOR
                value ^= value >> np.uint64(29)
                value += c[offset : len(c) - NGRAM + 1 + offset]
            value *= _FACTOR
            value |= _WIDE
            np.copyto(five, value, where=np.lib.stride_tricks.sliding_window_view(wide, NGRAM).any(axis=1))
    return ids


def narrow_set(text: str) -> Ids:
    """Return the distinct 5-grams of a text that is not wide, sorted, as integers."""
    return _distinct(_packed(code_points(text)))


def wide_set(text: str) -> NDArray[Any]:
    """Return the distinct 5-grams of any text, sorted, as 20 bytes each."""
    windows = np.lib.stride_tricks.sliding_window_view(code_points(text), NGRAM)
    return _distinct(np.array(windows, order="C").view(f"S{4 * NGRAM}").ravel())


def _distinct(grams: NDArray[Any]) -> NDArray[Any]:
    grams.sort()
    return grams[np.append(True, grams[1:] != grams[:-1])]


def is_wide(text: str) -> bool:
    """Return whether a text has code points that packed 5-grams cannot hold."""
    return not text.isascii() and ord(max(text)) >> _BITS != 0


def shared(a: NDArray[Any], b: NDArray[Any]) -> int:
    """Return how many elements two sorted arrays of distinct elements have in common."""
    both = np.concatenate([a, b])
    both.sort(kind="stable")  # merges the two sorted halves
    return int(np.count_nonzero(both[1:] == both[:-1]))


# Name -> similarity of two sets, from the size of their intersection and their own sizes.
SIMILARITIES: Mapping[str, Callable[[int, int, int], float]] = {
    "union": lambda both, a, b: both / (a + b - both),
    "min": lambda both, a, b: both / min(a, b),
    "max": lambda both, a, b: both / max(a, b),
}


def similarity(a: str, b: str, kind: str = "union") -> float:
    """Return the exact similarity of the sets of 5-grams of two texts, from 0 to 1.

    Args:
        a: A text.
        b: Another one.
        kind: Key of `SIMILARITIES`: what the size of the intersection is divided by.
    """
    make_set = wide_set if is_wide(a) or is_wide(b) else narrow_set
    first = make_set(a)
    second = make_set(b)
    return SIMILARITIES[kind](shared(first, second), len(first), len(second))


@dataclass(frozen=True)
class Bands:
    """Division of a signature: two documents are candidates if they agree in all rows of a band.

    Attributes:
        count: Number of bands.
        rows: Number of signature values in a band.
    """

    count: int
    rows: int

    def recall(self, similarity: float) -> float:
        """Return the expected share of pairs that are candidates (Leskovec et al., section 3.4).

        Args:
            similarity: Jaccard similarity of the pairs.
        """
        return 1 - (1 - similarity**self.rows) ** self.count


OLD_BANDS = Bands(10, 10)  # of the OpenWebText recipe in Megatron-LM


def bands_for(threshold: float) -> Bands:
    """Return the most selective bands whose expected recall at the threshold is at least 0.99.

    Raises:
        ConfigError: If no division of 128 values reaches it.
    """
    for rows in range(PERMUTATIONS, 0, -1):
        bands = Bands(PERMUTATIONS // rows, rows)
        if bands.recall(threshold) >= RECALL:
            return bands
    least = 1 - (1 - RECALL) ** (1 / PERMUTATIONS)
    raise ConfigError(
        f"--threshold {threshold}: {PERMUTATIONS} signature values find near-duplicates from a similarity of "
        f"{least:.3f} on; choose a higher threshold"
    )


def band_hashes(texts: Sequence[str], bands: Bands, seed: int) -> NDArray[np.uint64]:
    """Return a hash of each band of each text's signature [texts, bands].

    Args:
        texts: Texts, at least one.
        bands: Division of the signature.
        seed: Seed of the signature's hash functions; hashes of different seeds cannot be compared.
    """
    from rensa import RMinHash

    used = bands.count * bands.rows
    ids, starts = shingles_of_texts(texts)
    matrix = RMinHash.digest_matrix_from_flat_token_hashes(ids, starts, max(PERMUTATIONS, used), seed)
    values = np.array(matrix.to_rows(), dtype=np.uint64)[:, :used]
    # Multilinear hashing (Lemire and Kaser 2014): odd random factors, sum modulo 2**64.
    factors = np.random.default_rng(0).integers(0, 1 << 64, bands.rows, dtype=np.uint64) | np.uint64(1)
    hashes: NDArray[np.uint64] = values.reshape(len(texts), bands.count, bands.rows) @ factors
    return hashes
