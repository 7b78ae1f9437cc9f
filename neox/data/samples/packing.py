"""Packing: the documents of a sample, and the row of tokens that it becomes.

A row has seq_length + 1 tokens; all but the last are inputs, and all but the first are predicted. `pack_impl` says how
the documents of a pass, in random order, fill the rows (here 7, 2, 9, 4, ...; document 9 is longer than a row):

    packed                 documents are joined, and cut wherever a row is full; neighbouring rows share one token
        row 0              | document 7 |  document 2  |- 9 -|
        row 1                                                |--------- 9 ---------|- 4 -|
        row 2                                                                            |- 4 -| document 0 | ...

    pack_until_overflow    whole documents, until the next one does not fit; the end of a long one is lost
        row 0              | document 7 |  document 2  |     padding     |
        row 1              |----------------- document 9 ----------------|
        row 2              | document 4 | document 0 |      padding      |

    unpacked               one document in each row
        row 0              | document 7 |             padding            |

    best_fit               documents longer than a row are cut into pieces; each piece goes where it fits best
        row 0              |----------------- 9, piece 0 ----------------|
        row 1              |- 9, piece 1 -|  document 2  | document 7 | p |

Each is made in the same steps:

    usable_documents       the documents that have something to predict
    build_..._maps         the entries of each sample, and the order of samples; built once, and kept on disk
    ..._rows               tokens or labels of some samples; read for every batch

For `packed` the last two are `index_maps.build_index_maps` and `rows.TokenRows`, since its rows begin and end inside
documents. For the others they are here: an entry of `IndexMaps.document_map` is a document (`DocumentHeads`) or a piece
of one (`DocumentPieces`), and sample i has the entries from `sample_map[i, 0]` to `sample_map[i + 1, 0]`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from neox.config.sections.data import PackImpl
from neox.data.samples.index_maps import IndexMaps, shuffled
from neox.data.samples.rows import RowLayout
from neox.data.token_files.indexed_dataset import IndexedDataset
from neox.errors import DataError

WINDOW = 1 << 14
"""Pieces that `best_fit` packs at once."""


@dataclass(frozen=True)
class Packing:
    """The way documents become samples.

    Attributes:
        impl: Kind of packing; the picture above shows each.
        allow_chopped: Whether a document longer than a sample is used: its beginning, or with `best_fit` all of its
            pieces. Otherwise it is left out.
    """

    impl: PackImpl = "packed"
    allow_chopped: bool = True

    @property
    def is_padded(self) -> bool:
        """Whether samples end in padding."""
        return self.impl != "packed"


def read_tokens(sizes: np.ndarray, impl: PackImpl, seq_length: int) -> int:
    """Return how many tokens of a document are read at most, the last one aside: those of a sample, or all.

    Args:
        sizes: Number of tokens of every sequence of the dataset [sequences].
        impl: Kind of packing.
        seq_length: Number of tokens of a sample's input.
    """
    if impl == "best_fit":  # all pieces
        return max(seq_length, int(sizes.max(initial=0)))
    return seq_length


def usable_documents(
    indexed: IndexedDataset,
    labels: IndexedDataset | None,
    documents: range,
    seq_length: int,
    *,
    impl: PackImpl,
    allow_chopped: bool,
) -> np.ndarray:
    """Return which documents can be in a sample.

    A usable document has a token to predict in what is read of it. If documents may not be cut, it is not longer than a
    sample.

    Args:
        indexed: Token dataset.
        labels: Labels of its tokens. By default every token is predicted.
        documents: Numbers of the documents to use.
        seq_length: Number of tokens of a sample's input.
        impl: Kind of packing.
        allow_chopped: Whether longer documents are cut.

    Returns:
        Whether each document is usable, bool [documents].

    Raises:
        DataError: If no document is usable.
    """
    sizes = np.asarray(indexed.sizes[documents.start : documents.stop])
    usable = sizes > 1
    if not allow_chopped:
        usable &= sizes <= seq_length + 1
    if labels is not None:
        read = read_tokens(indexed.sizes, impl, seq_length)
        usable &= (predicted_tokens(labels, [read])[0] > 0)[documents.start : documents.stop]
    if usable.any():
        return usable
    wanted = "a document with at least two tokens"
    if not allow_chopped:
        wanted += f" and at most seq_length + 1 = {seq_length + 1} (allow_chopped is false)"
    if labels is not None:
        wanted += f", one of which, after the first, {labels.prefix} does not ignore"
    raise DataError(
        f"{indexed.prefix}: documents {documents.start} to {documents.stop} have no sample, because each needs "
        f"{wanted}; use other data, a longer seq_length or `pack_impl: packed`"
    )


def predicted_tokens(labels: IndexedDataset, lengths: Sequence[int]) -> np.ndarray:
    """Return the number of tokens to predict in a sample of each document, int64 [lengths, documents].

    These are among the tokens after the first one and up to the end of the sample. The labels are read once.

    Args:
        labels: Labels of the documents.
        lengths: Numbers of tokens of a sample's input, of which each gives a row of the result.
    """
    result = np.empty((len(lengths), len(labels)), dtype=np.int64)
    for first, sizes, ids in labels.blocks():
        predicted_before = np.concatenate([[0], np.cumsum(ids >= 0, dtype=np.int64)])  # before each token
        ends = np.cumsum(sizes, dtype=np.int64)
        begins = ends - sizes
        second_tokens = np.minimum(begins + 1, ends)
        for row, length in zip(result, lengths, strict=True):
            sample_ends = np.minimum(begins + length + 1, ends)
            row[first : first + len(sizes)] = predicted_before[sample_ends] - predicted_before[second_tokens]
    return result


class LocatedPieces(NamedTuple):
    """Places of pieces in their documents.

    Attributes:
        documents: Number of the sequence of each piece [pieces].
        begins: First token of each piece in its sequence [pieces].
        ends: Token after the last one of each piece in its sequence [pieces].
    """

    documents: np.ndarray
    begins: np.ndarray
    ends: np.ndarray


@dataclass(frozen=True)
class DocumentHeads:
    """Entries of `pack_until_overflow` and `unpacked`: the first tokens of each document, as many as a row holds.

    Attributes:
        sizes: Number of tokens of every sequence of the dataset [sequences].
        width: Number of tokens of a row.
    """

    sizes: np.ndarray
    width: int

    def locate(self, entries: np.ndarray) -> LocatedPieces:
        """Return the place of each entry, which is the number of a sequence."""
        return LocatedPieces(entries, np.zeros_like(entries), np.minimum(self.sizes[entries], self.width))


@dataclass(frozen=True)
class DocumentPieces:
    """Entries of `best_fit`: pieces of at most a row, numbered through all documents.

    Neighbouring pieces of a document share one token, so that each of its tokens but the first is predicted once:

        document    |----------- piece 0 -----------|
                                                    |------ piece 1 ------|

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
        used_sizes = np.where(usable, sizes[documents.start : documents.stop], 0).astype(np.int64)
        pieces_of_each = -(-np.maximum(used_sizes - 1, 0) // seq_length)  # rounded up
        return cls(documents.start, used_sizes, np.cumsum(pieces_of_each), seq_length)

    def __len__(self) -> int:
        return int(self.ends[-1])

    @property
    def width(self) -> int:
        """Number of tokens of a row."""
        return self.seq_length + 1

    def locate(self, entries: np.ndarray) -> LocatedPieces:
        """Return the place of each entry, which is the number of a piece."""
        documents = np.searchsorted(self.ends, entries, side="right")
        pieces_before = np.where(documents > 0, self.ends[documents - 1], 0)
        begins = (entries - pieces_before) * self.seq_length
        ends = np.minimum(begins + self.width, self.sizes[documents])
        return LocatedPieces(documents + self.first_document, begins, ends)

    def lengths(self, numbers: np.ndarray) -> np.ndarray:
        """Return the number of tokens of each piece."""
        located = self.locate(numbers)
        return located.ends - located.begins


def build_whole_document_maps(
    sizes: np.ndarray,
    documents: range,
    usable: np.ndarray,
    *,
    impl: PackImpl,
    num_samples: int | None,
    seq_length: int,
    seed: int,
) -> IndexMaps:
    """Build the index maps of `pack_until_overflow` and `unpacked`, by the same draws as later versions of gpt-neox.

    Args:
        sizes: Number of tokens of every sequence of the dataset [sequences].
        documents: Numbers of the sequences to use.
        usable: Which of them are usable, from `usable_documents` [documents].
        impl: `pack_until_overflow` or `unpacked`.
        num_samples: Number of samples that the run reads. So many are made, in several passes if needed; None makes
            those of one pass.
        seq_length: Number of tokens of a sample's input.
        seed: Seed of the shuffles.
    """
    own_sizes = np.asarray(sizes[documents.start : documents.stop])
    room = seq_length + 1
    random = np.random.RandomState(seed)
    if num_samples is None:
        if impl == "unpacked":
            entries = np.flatnonzero(usable)
            starts = np.arange(len(entries) + 1)
        else:
            entries, starts = _one_pass_until_overflow(own_sizes, usable, room, random)
        samples = len(starts) - 1
        shuffle_map = shuffled(samples, random)
    else:
        samples = max(1, num_samples)
        shuffle_map = shuffled(samples, random)  # before the documents, as gpt-neox does
        if impl == "unpacked":
            entries = np.resize(np.flatnonzero(usable), samples)
            starts = np.arange(samples + 1)
        else:
            entries, starts = _until_overflow(own_sizes, usable, samples, room, random)
    sample_map = np.zeros((samples + 1, 2), dtype=np.int64)
    sample_map[:, 0] = starts
    return IndexMaps((entries + documents.start).astype(np.int32), sample_map, shuffle_map)


def _until_overflow(
    sizes: np.ndarray, usable: np.ndarray, samples: int, room: int, random: np.random.RandomState
) -> tuple[np.ndarray, np.ndarray]:
    """Fill samples with documents in random order. A document that does not fit begins the next sample.

    Args:
        sizes: Number of tokens of each document.
        usable: Which documents are usable.
        samples: Number of samples to make.
        room: Number of tokens of a sample.
        random: Source of the shuffles.

    Returns:
        The documents in the order of samples, and the entries where samples begin; the last one is the end of the last
        sample [samples + 1].
    """
    order = np.arange(len(sizes))
    tokens = sizes.tolist()
    entries: list[int] = []
    starts: list[int] = []
    left = 0  # room in the last sample
    while True:
        random.shuffle(order)
        for document in order[usable[order]].tolist():
            if not starts or tokens[document] > left:
                starts.append(len(entries))
                left = room
                if len(starts) > samples:
                    return np.array(entries), np.array(starts)
            entries.append(document)
            left -= tokens[document]


def _one_pass_until_overflow(
    sizes: np.ndarray, usable: np.ndarray, room: int, random: np.random.RandomState
) -> tuple[np.ndarray, np.ndarray]:
    """Fill samples with every usable document once. Arguments and result as for `_until_overflow`."""
    order = np.arange(len(sizes))
    random.shuffle(order)
    entries = order[usable[order]]
    starts: list[int] = []
    left = 0  # room in the last sample
    for entry, tokens in enumerate(sizes[entries].tolist()):
        if not starts or tokens > left:
            starts.append(entry)
            left = room
        left -= tokens
    return entries, np.array([*starts, len(entries)])


def build_best_fit_maps(pieces: DocumentPieces, *, num_samples: int | None, seed: int) -> IndexMaps:
    """Build the index maps of `best_fit` (arXiv:2404.10830).

    Pieces of a pass are shuffled. Windows of them, one after the other, are packed by best-fit decreasing: the longest
    first, each into the sample that it fills best. So a document's neighbours change from pass to pass.

    Args:
        pieces: Pieces of the documents.
        num_samples: Number of samples that the run reads. So many are made, in several passes if needed; None makes
            those of one pass.
        seed: Seed of the shuffles.
    """
    random = np.random.RandomState(seed)
    if num_samples is None:
        order = np.arange(len(pieces))
        random.shuffle(order)
        packs = list(packed(order, pieces.lengths(order), pieces.width))
        ends = np.cumsum([0, *map(len, packs)])
        of_pass = np.stack([ends, np.zeros_like(ends)], axis=1)
        return IndexMaps(np.concatenate(packs), of_pass, shuffled(len(packs), random))
    samples = max(1, num_samples)
    shuffle_map = shuffled(samples, random)
    entries: list[int] = []
    sample_map = np.zeros((samples + 1, 2), dtype=np.int64)
    made = 0
    while made < samples:
        order = np.arange(len(pieces))
        random.shuffle(order)
        for sample in packed(order, pieces.lengths(order), pieces.width):
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


def padded_rows(
    source: IndexedDataset,
    pieces: DocumentHeads | DocumentPieces,
    maps: IndexMaps,
    samples: np.ndarray,
    padding: int,
    dtype: np.dtype,
    *,
    shared: int | None = None,
) -> np.ndarray:
    """Return samples of whole documents or pieces, and then padding.

    Args:
        source: Tokens, or their labels.
        pieces: Places of the entries of `maps`.
        maps: Index maps of a packing with padding.
        samples: Numbers of the samples in `sample_map` [n].
        padding: Value after the last piece.
        dtype: Dtype of the rows.
        shared: Value in place of a token that a piece shares with the one before, which has predicted it already; the
            token itself if None.

    Returns:
        Rows [n, seq_length + 1].
    """
    rows = np.full((len(samples), pieces.width), padding, dtype=dtype)
    for row, entries in zip(rows, _entries_of(maps, samples), strict=True):
        located = pieces.locate(entries)
        filled = 0
        for document, begin, end in zip(*(part.tolist() for part in located), strict=True):
            length = end - begin
            row[filled : filled + length] = source[document][begin:end]
            if begin > 0 and shared is not None:
                row[filled] = shared
            filled += length
    return rows


def padded_layout(pieces: DocumentHeads | DocumentPieces, maps: IndexMaps, samples: np.ndarray) -> RowLayout:
    """Return where the pieces of samples start, and where their padding does. Arguments as for `padded_rows`."""
    lengths = []
    for entries in _entries_of(maps, samples):
        located = pieces.locate(entries)
        lengths.append((located.ends - located.begins).tolist())
    return RowLayout.of(lengths, pieces.width)


def _entries_of(maps: IndexMaps, samples: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the entries of each sample."""
    firsts = maps.sample_map[samples, 0].tolist()
    ends = maps.sample_map[samples + 1, 0].tolist()
    for first, end in zip(firsts, ends, strict=True):
        yield maps.document_map[first:end].astype(np.int64)
