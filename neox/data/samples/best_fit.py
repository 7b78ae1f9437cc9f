"""Samples of whole documents that are packed to leave little padding (`pack_impl: best_fit`, arXiv:2404.10830).

A document is cut only if it is longer than a sample. Neighbouring pieces of it share one token, so that each of its
tokens but the first is predicted once:

    document    |----------- piece 0 -----------|
                                                |------ piece 1 ------|
    samples     |----------- piece 0 -----------|
                |------ piece 1 ------|- document 4 -|- 9 -|  padding |

Pieces of a pass are shuffled. Windows of them, one after the other, are packed by best-fit decreasing: the longest
first, each into the sample that it fills best.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from neox.data.samples.index_maps import IndexMaps, shuffled
from neox.data.token_files.indexed_dataset import IndexedDataset

WINDOW = 1 << 14
"""Pieces that are packed at once."""


@dataclass(frozen=True)
class DocumentPieces:
    """Documents, cut into pieces of at most a sample. Pieces are numbered through all documents.

    Attributes:
        first_document: Number of the first document in the dataset.
        sizes: Number of tokens of each document, 0 for those that are left out [documents].
        ends: Number of pieces of each document and all before it [documents].
        seq_length: Number of tokens of a sample's input.
    """

    first_document: int
    sizes: np.ndarray
    ends: np.ndarray
    seq_length: int

    @classmethod
    def of(cls, sizes: np.ndarray, usable: np.ndarray, documents: range, seq_length: int) -> DocumentPieces:
        """Cut documents.

        Args:
            sizes: Number of tokens of every sequence of the dataset [sequences].
            usable: Which of the documents are used [documents].
            documents: Numbers of the documents.
            seq_length: Number of tokens of a sample's input.
        """
        own = np.where(usable, sizes[documents.start : documents.stop], 0).astype(np.int64)
        counts = -(-np.maximum(own - 1, 0) // seq_length)
        return cls(documents.start, own, np.cumsum(counts), seq_length)

    def __len__(self) -> int:
        return int(self.ends[-1])

    def locate(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the document of each piece, counted from the first one, and its first and end tokens there."""
        documents = np.searchsorted(self.ends, numbers, side="right")
        before = np.where(documents > 0, self.ends[documents - 1], 0)
        first = (numbers - before) * self.seq_length
        return documents, first, np.minimum(first + self.seq_length + 1, self.sizes[documents])

    def lengths(self, numbers: np.ndarray) -> np.ndarray:
        """Return the number of tokens of each piece."""
        _, first, end = self.locate(numbers)
        return end - first


class PackingShares(NamedTuple):
    """What a packing wastes.

    Attributes:
        padding: Share of the positions of samples that are padding.
        cut: Share of the documents that are cut.
    """

    padding: float
    cut: float


def build_best_fit_maps(
    sizes: np.ndarray, documents: range, usable: np.ndarray, *, num_samples: int, seq_length: int, seed: int
) -> IndexMaps:
    """Build the index maps. Sample i consists of the pieces `document_map[a:b]`, as in `build_padded_maps`.

    Args:
        sizes: Number of tokens of every sequence of the dataset [sequences].
        documents: Numbers of the sequences to use.
        usable: Which of them are usable [documents].
        num_samples: Number of samples that the run reads. So many are made, in several passes if needed.
        seq_length: Number of tokens of a sample's input.
        seed: Seed of the shuffles.
    """
    samples = max(1, num_samples)
    random = np.random.RandomState(seed)
    shuffle_map = shuffled(samples, random)
    pieces = DocumentPieces.of(sizes, usable, documents, seq_length)
    entries: list[int] = []
    sample_map = np.zeros((samples + 1, 2), dtype=np.int64)
    made = 0
    while made < samples:
        order = np.arange(len(pieces))
        random.shuffle(order)
        for sample in packed(order, pieces.lengths(order), seq_length + 1):
            if made == samples:
                break
            entries += sample
            made += 1
            sample_map[made, 0] = len(entries)
    return IndexMaps(np.array(entries), sample_map, shuffle_map)


def packed(numbers: np.ndarray, lengths: np.ndarray, room: int) -> Iterator[list[int]]:
    """Yield the pieces of each sample, window after window.

    Args:
        numbers: Numbers of the pieces, in the order of the pass.
        lengths: Number of tokens of each.
        room: Number of tokens of a sample.
    """
    for start in range(0, len(numbers), WINDOW):
        window = slice(start, start + WINDOW)
        yield from _best_fit_decreasing(numbers[window], lengths[window], room)


def _best_fit_decreasing(numbers: np.ndarray, lengths: np.ndarray, room: int) -> list[list[int]]:
    """Return the pieces of each sample of one window. Pieces of one length keep their order."""
    longest_first = np.argsort(-lengths, kind="stable")
    samples: list[list[int]] = []
    open_samples: list[tuple[int, int]] = []  # (room that is left, number of the sample), least room first
    for number, length in zip(numbers[longest_first].tolist(), lengths[longest_first].tolist(), strict=True):
        place = bisect_left(open_samples, (length, 0))
        if place < len(open_samples):
            left, sample = open_samples.pop(place)
            samples[sample].append(number)
        else:
            left = room
            sample = len(samples)
            samples.append([number])
        left -= length
        if left > 1:  # a piece has two tokens at least
            insort(open_samples, (left, sample))
    return samples


def samples_of_pieces(sizes: np.ndarray, seq_length: int) -> int:
    """Return the number of samples that documents of given sizes, two tokens or more, make in the given order."""
    return sum(1 for _ in _pack_in_order(sizes, seq_length))


def packing_shares(sizes: np.ndarray, seq_length: int) -> PackingShares:
    """Return what packing documents of given sizes wastes; those of less than two tokens are left out."""
    usable = sizes[sizes > 1]
    if not len(usable):
        return PackingShares(0.0, 0.0)
    pieces = DocumentPieces.of(usable, usable > 1, range(len(usable)), seq_length)
    filled = int(pieces.lengths(np.arange(len(pieces))).sum())
    positions = samples_of_pieces(usable, seq_length) * (seq_length + 1)
    return PackingShares(1.0 - filled / positions, float((usable > seq_length + 1).mean()))


def _pack_in_order(sizes: np.ndarray, seq_length: int) -> Iterator[list[int]]:
    pieces = DocumentPieces.of(sizes, sizes > 1, range(len(sizes)), seq_length)
    order = np.arange(len(pieces))
    return packed(order, pieces.lengths(order), seq_length + 1)


def best_fit_rows(
    source: IndexedDataset,
    pieces: DocumentPieces,
    maps: IndexMaps,
    samples: np.ndarray,
    padding: int,
    dtype: np.dtype,
    *,
    shared: int | None = None,
) -> np.ndarray:
    """Return samples of pieces.

    Args:
        source: Tokens, or their labels.
        pieces: The pieces of its documents.
        maps: Index maps from `build_best_fit_maps`.
        samples: Numbers of the samples in `sample_map` [n].
        padding: Value after the last piece.
        dtype: Dtype of the rows.
        shared: Value in place of a token that the piece shares with the one before; the token itself if None.

    Returns:
        Rows [n, seq_length + 1].
    """
    rows = np.full((len(samples), pieces.seq_length + 1), padding, dtype=dtype)
    firsts = maps.sample_map[samples, 0].tolist()
    ends = maps.sample_map[samples + 1, 0].tolist()
    for row, first, end in zip(rows, firsts, ends, strict=True):
        located = pieces.locate(maps.document_map[first:end].astype(np.int64))
        at = 0
        for document, begin, stop in zip(*(part.tolist() for part in located), strict=True):
            length = stop - begin
            row[at : at + length] = source[pieces.first_document + document][begin:stop]
            if begin > 0 and shared is not None:
                row[at] = shared
            at += length
    return rows
