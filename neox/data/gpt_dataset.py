"""Samples of a token dataset for causal language modelling, and the division of documents by `split`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from neox.config.sections.data import split_shares
from neox.data.fill_in_middle import FillInMiddle
from neox.data.index_maps import IndexMaps, build_index_maps, content_key, load_or_build
from neox.data.indexed_dataset import IGNORED, IndexedDataset
from neox.data.packing import Packing, build_padded_maps, padded_rows, usable_documents
from neox.errors import DataError


def split_documents(split: str, documents: int) -> tuple[range, range, range]:
    """Divide the documents [0, documents) by NeoX's `split` and its rounding. Raises ConfigError as `split_shares`."""
    edges = [0]
    for share in split_shares(split):
        edges.append(edges[-1] + round(share * documents))
    surplus = edges[-1] - documents  # due to rounding; gpt-neox takes it from the first part
    edges[1:] = [max(0, edge - surplus) for edge in edges[1:]]
    return range(edges[0], edges[1]), range(edges[1], edges[2]), range(edges[2], edges[3])


class GPTDataset:
    """Samples of `seq_length + 1` tokens from shuffled documents, in gpt-neox's order.

    By default the documents of all epochs, in random order, are joined to one stream of tokens, and the stream is cut
    into samples:

        stream    | document 7 | document 2 |       document 9       | document 0 | ...
        samples   |------ sample 0 -----|------ sample 1 -----|------ sample 2 -----| ...

    Neighbours share one token: the last target of a sample is the first input of the next one. Samples are then
    shuffled. With another `packing`, samples are whole documents and padding.

    `len()` is `num_samples - 1`, as in gpt-neox; the last sample can be read all the same.

    Attributes:
        indexed: Token dataset.
        labels: Labels of its tokens with the same sequences, IGNORED for a token that is not predicted. None if each
            token is its own label.
        packing: The way documents become samples.
        fill_in_middle: Rearrangement of documents; None leaves them in their order.
        seq_length: Number of tokens of a sample's input.
        num_samples: Number of samples that can be read.
        maps: Index maps.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        documents: range,
        num_samples: int,
        seq_length: int,
        seed: int,
        cache_dir: str | Path | None = None,
        *,
        packing: Packing | None = None,
        labels: IndexedDataset | None = None,
        fill_in_middle: FillInMiddle | None = None,
    ) -> None:
        """Build or load the index maps.

        Args:
            indexed: Token dataset.
            documents: Numbers of the sequences to use, with step 1.
            num_samples: Number of samples that the run reads. It determines the number of epochs.
            seq_length: Number of tokens of a sample's input.
            seed: Seed of the shuffles.
            cache_dir: Directory that keeps the maps between runs; None builds them in memory.
            packing: The way documents become samples (default: joined and cut).
            labels: Labels of the tokens, with the same sequences. By default each token is its own label.
            fill_in_middle: Rearrangement of documents. It needs joined documents without labels.

        Raises:
            DataError: If the documents do not exist, or hold less than one sample.
        """
        if documents.step != 1 or not 0 <= documents.start < documents.stop <= len(indexed):
            raise DataError(f"{indexed.prefix} has {len(indexed)} documents; {documents} is not a range of them")
        self.indexed = indexed
        self.labels = labels
        self.packing = packing or Packing()
        self.fill_in_middle = fill_in_middle
        assert fill_in_middle is None or not self.has_labels
        self.seq_length = seq_length
        self.maps = self._maps(documents, num_samples, seed, cache_dir)
        self.num_samples = len(self.maps.shuffle_map)
        if self.num_samples == 0:
            raise DataError(
                f"{indexed.prefix}: documents {documents.start} to {documents.stop} hold fewer than seq_length + 1 = "
                f"{seq_length + 1} tokens, not one sample; use more data or a shorter seq_length"
            )

    def _maps(self, documents: range, num_samples: int, seed: int, cache_dir: str | Path | None) -> IndexMaps:
        """Build or load the index maps; arguments as for the constructor."""
        sizes = self.indexed.sizes
        settings = {"num_samples": num_samples, "seq_length": self.seq_length, "seed": seed}
        build: Callable[..., IndexMaps] = build_index_maps
        packing = b""
        if self.packing.is_padded:
            usable = usable_documents(
                self.indexed, self.labels, documents, self.seq_length, allow_chopped=self.packing.allow_chopped
            )
            build = partial(build_padded_maps, usable=usable, impl=self.packing.impl)
            packing = self.packing.impl.encode() + np.packbits(usable).tobytes()
        if cache_dir is None:
            return build(sizes, documents, **settings)
        key = content_key(sizes, documents, **settings, packing=packing)
        names = tuple(field.name for field in fields(IndexMaps))
        arrays = load_or_build(cache_dir, key, names, lambda: vars(build(sizes, documents, **settings)))
        return IndexMaps(**arrays)

    def __len__(self) -> int:
        return self.num_samples - 1

    @property
    def row_width(self) -> int:
        """Number of ids in a row of `read`."""
        return self.seq_length + 1

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the rows of `read`."""
        if self.fill_in_middle is None:
            return self.indexed.dtype
        return np.result_type(self.indexed.dtype, np.min_scalar_type(max(self.fill_in_middle.tokens)))

    def __getitem__(self, index: int) -> np.ndarray:
        """Return one sample, int64 [seq_length + 1]."""
        return np.asarray(self.read([index])[0], dtype=np.int64)

    @property
    def has_labels(self) -> bool:
        """Whether some tokens are not predicted, so that the labels differ from the tokens."""
        return self.labels is not None or self.packing.is_padded

    def read(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the token ids of samples [len(indices), seq_length + 1]. Padding is 0."""
        return self._rows(self.indexed, indices, padding=0, dtype=self.dtype)

    def read_labels(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the label of each token of samples, IGNORED for a token that is not predicted.

        Returns:
            Labels, int32 or int64 [len(indices), seq_length + 1].
        """
        source = self.indexed if self.labels is None else self.labels
        return self._rows(source, indices, padding=IGNORED, dtype=np.result_type(self.dtype, source.dtype, np.int32))

    def _rows(
        self, source: IndexedDataset, indices: Sequence[int] | np.ndarray, *, padding: int, dtype: np.dtype
    ) -> np.ndarray:
        samples = self.maps.shuffle_map[np.asarray(indices, dtype=np.intp)].astype(np.intp)
        if self.packing.is_padded:
            return padded_rows(source, self.maps, samples, self.row_width, padding, dtype)
        pieces = locate_pieces(source, self.maps, samples)
        if self.fill_in_middle is None:
            rows = joined_rows(source, pieces, self.row_width)
        elif self.fill_in_middle.level == "document":
            parts = self._rearranged_parts(pieces, self.fill_in_middle)
            rows = np.concatenate(parts).reshape(len(samples), self.row_width)
        else:
            rows = joined_rows(source, pieces, self.row_width)
            rows = self.fill_in_middle.samples(rows, samples)
        return rows.astype(dtype, copy=False)

    def _rearranged_parts(self, pieces: Pieces, fill_in_middle: FillInMiddle) -> list[np.ndarray]:
        """Return the tokens of pieces of documents, of which those that fit into a sample may be rearranged."""
        documents = self.maps.document_map[pieces.entries]
        starts = self.indexed.starts(documents).tolist()
        sizes = self.indexed.sizes[documents].tolist()
        parts = []
        for entry, start, size, begin, end in zip(
            pieces.entries.tolist(), starts, sizes, pieces.begins, pieces.ends, strict=True
        ):
            ids = self.indexed.tokens[start : start + size]
            if size <= self.row_width:
                ids = fill_in_middle.document(ids, entry)
            parts.append(ids[begin - start : end - start])
        return parts


class Pieces(NamedTuple):
    """Pieces of documents that make samples.

    Attributes:
        entries: Entry of the document of each piece in `document_map` [pieces].
        begins: First token of each piece in the file [pieces].
        ends: Token after the last one of each piece in the file [pieces].
    """

    entries: np.ndarray
    begins: list[int]
    ends: list[int]


def locate_pieces(source: IndexedDataset, maps: IndexMaps, samples: np.ndarray) -> Pieces:
    """Locate the pieces of samples in the stream of joined documents.

    A sample consists of one piece of each document that it touches. All pieces of all samples are located at once:

        | document 7 |     document 2     |   document 9   |
               |-------------- sample -------------|
               |- piece -|----- piece ----|- piece |

    Args:
        source: Tokens, or their labels.
        maps: Index maps.
        samples: Numbers of the samples in the stream.
    """
    first_entries, first_offsets = maps.sample_map[samples].T
    last_entries, last_offsets = maps.sample_map[samples + 1].T
    pieces = last_entries.astype(np.intp) - first_entries + 1  # of each sample [n]
    first_pieces = np.cumsum(pieces) - pieces
    last_pieces = first_pieces + pieces - 1
    # Entry of each piece in `document_map`: from the first to the last entry of its sample [all pieces].
    entries = np.arange(pieces.sum()) + np.repeat(first_entries - first_pieces, pieces)
    documents = maps.document_map[entries]
    begins = source.starts(documents)
    ends = begins + source.sizes[documents]
    ends[last_pieces] = begins[last_pieces] + last_offsets + 1
    begins[first_pieces] += first_offsets
    return Pieces(entries, begins.tolist(), ends.tolist())


def joined_rows(source: IndexedDataset, pieces: Pieces, width: int) -> np.ndarray:
    """Return samples of `width` tokens [samples, width], in the dtype of `source`."""
    tokens = source.tokens
    parts = [tokens[begin:end] for begin, end in zip(pieces.begins, pieces.ends, strict=True)]
    return np.concatenate(parts).reshape(-1, width)
