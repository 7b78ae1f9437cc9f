"""MinHash signatures in bands: documents that share the hash of a band are candidates for near-duplicates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from neox.errors import ConfigError
from tools.web_text.shingles import shingles_of_texts

PERMUTATIONS = 128
RECALL = 0.99


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
