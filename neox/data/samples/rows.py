"""Rows of tokens: samples that are cut from documents in a given order."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from neox.data.samples.fill_in_middle import FillInMiddle
from neox.data.token_files.indexed_dataset import IGNORED, IndexedDataset


class SampleCuts(NamedTuple):
    """Places where samples are cut from joined documents.

    Attributes:
        documents: Numbers of the sequences in their order [entries].
        firsts: First token of each sample, as its entry in `documents` and its offset in that document [samples, 2].
        lasts: Last token of each sample in the same form [samples, 2].
        numbers: Number of each sample, which is different for all samples of a dataset [samples].
        first_entry: Number of the first entry, which is different for all passes over a dataset.
    """

    documents: np.ndarray
    firsts: np.ndarray
    lasts: np.ndarray
    numbers: np.ndarray
    first_entry: int = 0


class DocumentSpans(NamedTuple):
    """Pieces of documents that make samples.

    Attributes:
        entries: Entry of the document of each piece [pieces].
        begins: First token of each piece in the file [pieces].
        ends: Token after the last one of each piece in the file [pieces].
    """

    entries: np.ndarray
    begins: list[int]
    ends: list[int]


class RowLayout(NamedTuple):
    """Where the documents of rows stand. It follows from the pieces that were joined, not from any token.

    Attributes:
        starts: Index in the row at which the document of each token starts; 0 for one that starts before the row.
            Padding is a document of its own [samples, tokens].
        lengths: Number of tokens before the padding [samples].
    """

    starts: np.ndarray
    lengths: np.ndarray

    @classmethod
    def of(cls, pieces: Sequence[Sequence[int]], width: int) -> RowLayout:
        """Return the layout of rows that begin with pieces.

        Args:
            pieces: Number of tokens of each piece of each row. What does not fit in a row is cut off.
            width: Number of tokens of a row.
        """
        starts = np.empty((len(pieces), width), dtype=np.int64)
        lengths = np.empty(len(pieces), dtype=np.int64)
        for row, sizes in enumerate(pieces):
            begin = 0
            for size in sizes:
                starts[row, begin : begin + size] = begin
                begin += size
            lengths[row] = min(begin, width)
            starts[row, begin:] = begin
        return cls(starts, lengths)


class TokenRows:
    """Reader of samples as rows of tokens, and of their labels.

    Attributes:
        indexed: Token dataset.
        labels: Labels of its tokens with the same sequences; None if each token is its own label.
        fill_in_middle: Rearrangement of documents; None leaves them in their order.
        width: Number of tokens of the longest sample, which decides the documents that are rearranged as a whole.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        labels: IndexedDataset | None,
        fill_in_middle: FillInMiddle | None,
        width: int,
    ) -> None:
        assert labels is None or fill_in_middle is None
        self.indexed = indexed
        self.labels = labels
        self.fill_in_middle = fill_in_middle
        self.width = width

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the tokens."""
        if self.fill_in_middle is None:
            return self.indexed.dtype
        return np.result_type(self.indexed.dtype, np.min_scalar_type(max(self.fill_in_middle.tokens)))

    @property
    def label_source(self) -> IndexedDataset:
        """Dataset of the labels, which may be that of the tokens."""
        return self.indexed if self.labels is None else self.labels

    @property
    def label_dtype(self) -> np.dtype:
        """Dtype of the labels, which can hold IGNORED."""
        return np.result_type(self.dtype, self.label_source.dtype, np.min_scalar_type(IGNORED), np.int32)

    def read(self, cuts: SampleCuts) -> np.ndarray:
        """Return the tokens of samples of one length [samples, length + 1]."""
        return self._rows(self.indexed, cuts).astype(self.dtype, copy=False)

    def read_labels(self, cuts: SampleCuts) -> np.ndarray:
        """Return the label of each token of samples of one length [samples, length + 1]."""
        return self._rows(self.label_source, cuts).astype(self.label_dtype, copy=False)

    def layout(self, cuts: SampleCuts) -> RowLayout:
        """Return where the documents of samples of one length start."""
        pieces = locate_spans(self.indexed, cuts)
        sizes = np.asarray(pieces.ends, dtype=np.int64) - np.asarray(pieces.begins, dtype=np.int64)
        begins = np.cumsum(sizes) - sizes
        starts = np.repeat(begins, sizes).reshape(len(cuts.firsts), -1)
        starts -= np.arange(len(starts))[:, None] * starts.shape[1]
        return RowLayout(starts, np.full(len(starts), starts.shape[1]))

    def _rows(self, source: IndexedDataset, cuts: SampleCuts) -> np.ndarray:
        pieces = locate_spans(source, cuts)
        if self.fill_in_middle is not None and self.fill_in_middle.level == "document":
            ids = np.concatenate(self._rearranged_parts(cuts, pieces, self.fill_in_middle))
        else:
            ids = source.joined(pieces.begins, pieces.ends)
        rows = ids.reshape(len(cuts.firsts), -1)
        if self.fill_in_middle is not None and self.fill_in_middle.level == "sample":
            return self.fill_in_middle.samples(rows, cuts.numbers, self.layout(cuts).starts)
        return rows

    def _rearranged_parts(
        self, cuts: SampleCuts, pieces: DocumentSpans, fill_in_middle: FillInMiddle
    ) -> list[np.ndarray]:
        """Return the tokens of pieces of documents; documents that fit into a sample may be rearranged."""
        documents = cuts.documents[pieces.entries]
        starts = self.indexed.starts(documents).tolist()
        sizes = self.indexed.sizes[documents].tolist()
        entries = (pieces.entries + cuts.first_entry).tolist()
        parts = []
        for entry, start, size, begin, end in zip(entries, starts, sizes, pieces.begins, pieces.ends, strict=True):
            ids = self.indexed.tokens[start : start + size]
            if size <= self.width:
                ids = fill_in_middle.document(ids, entry)
            parts.append(ids[begin - start : end - start])
        return parts


class TrainingDocuments(NamedTuple):
    """Training dataset, or a part of one.

    Attributes:
        rows: Reader of its samples.
        documents: Numbers of its sequences.
        cache_dir: Directory that keeps the order of samples between runs; None keeps it in memory.
    """

    rows: TokenRows
    documents: range
    cache_dir: Path | None


def locate_spans(source: IndexedDataset, cuts: SampleCuts) -> DocumentSpans:
    """Locate the pieces of samples in a file.

    A sample consists of one piece of each document that it touches. All pieces of all samples are located at once:

        | document 7 |     document 2     |   document 9   |
               |-------------- sample -------------|
               |- piece -|----- piece ----|- piece |

    Args:
        source: Tokens, or their labels.
        cuts: Places where the samples are cut.
    """
    first_entries, first_offsets = cuts.firsts.T
    last_entries, last_offsets = cuts.lasts.T
    pieces = last_entries.astype(np.intp) - first_entries + 1  # of each sample [samples]
    first_pieces = np.cumsum(pieces) - pieces
    last_pieces = first_pieces + pieces - 1
    # Entry of each piece: from the first to the last entry of its sample [all pieces].
    entries = np.arange(pieces.sum()) + np.repeat(first_entries - first_pieces, pieces)
    documents = cuts.documents[entries]
    begins = source.starts(documents)
    ends = begins + source.sizes[documents]
    ends[last_pieces] = begins[last_pieces] + last_offsets + 1
    begins[first_pieces] += first_offsets
    return DocumentSpans(entries, begins.tolist(), ends.tolist())
