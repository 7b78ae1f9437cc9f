"""Samples of a token dataset for causal language modelling, and the division of documents by `split`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path

import numpy as np

from neox.config.sections.data import split_shares
from neox.data.index_maps import IndexMaps, build_index_maps, content_key, load_or_build
from neox.data.indexed_dataset import IGNORED, IndexedDataset
from neox.data.packing import Packing, build_padded_maps, usable_documents
from neox.errors import DataError


def split_documents(split: str, documents: int) -> tuple[range, range, range]:
    """Divide documents [0, documents) by NeoX's `split`, with its rounding. Raises ConfigError as `split_shares`."""
    edges = [0]
    for share in split_shares(split):
        edges.append(edges[-1] + round(share * documents))
    surplus = edges[-1] - documents  # due to rounding; gpt-neox takes it from the first part
    edges[1:] = [max(0, edge - surplus) for edge in edges[1:]]
    return range(edges[0], edges[1]), range(edges[1], edges[2]), range(edges[2], edges[3])


class GPTDataset:
    """Samples of `seq_length + 1` tokens of shuffled documents, in gpt-neox's order.

    `len()` is gpt-neox's: one less than `num_samples`, all of which can be read.

    Attributes:
        indexed: The token dataset.
        labels: Labels of its tokens, sequence by sequence, IGNORED for tokens that are not predicted; None if the
            tokens are the labels.
        packing: How documents make samples.
        seq_length: Tokens of a sample's input.
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
    ) -> None:
        """Build or load the index maps.

        Args:
            indexed: The token dataset.
            documents: Sequence numbers to use, with step 1.
            num_samples: Samples that the run reads; determines the number of epochs.
            seq_length: Tokens of a sample's input.
            seed: Of the shuffles.
            cache_dir: Directory where the maps are kept between runs; None builds them in memory.
            packing: How documents make samples (default: joined and cut).
            labels: Labels of the tokens, with the same sequences; None for the tokens themselves.

        Raises:
            DataError: If the documents do not exist, or hold less than one sample.
        """
        if documents.step != 1 or not 0 <= documents.start < documents.stop <= len(indexed):
            raise DataError(f"{indexed.prefix} has {len(indexed)} documents; {documents} is not a range of them")
        self.indexed = indexed
        self.labels = labels
        self.packing = packing or Packing()
        self.seq_length = seq_length
        self.maps = self._build(documents, num_samples, seed, cache_dir)
        self.num_samples = len(self.maps.shuffle_map)
        if self.num_samples == 0:
            raise DataError(
                f"{indexed.prefix}: documents {documents.start} to {documents.stop} hold fewer than seq_length + 1 = "
                f"{seq_length + 1} tokens, not one sample; use more data or a shorter seq_length"
            )

    def _build(self, documents: range, num_samples: int, seed: int, cache_dir: str | Path | None) -> IndexMaps:
        sizes, arguments = self.indexed.sizes, {"num_samples": num_samples, "seq_length": self.seq_length, "seed": seed}
        packing, build = b"", partial(build_index_maps, sizes, documents, **arguments)
        if self.packing.is_padded:
            usable = usable_documents(
                self.indexed, self.labels, documents, self.seq_length, allow_chopped=self.packing.allow_chopped
            )
            packing = self.packing.impl.encode() + np.packbits(usable).tobytes()
            build = partial(build_padded_maps, sizes, documents, usable, impl=self.packing.impl, **arguments)
        key = "" if cache_dir is None else content_key(sizes, documents, **arguments, packing=packing)
        names = tuple(field.name for field in fields(IndexMaps))
        return IndexMaps(**load_or_build(cache_dir, key, names, lambda: vars(build())))

    def __len__(self) -> int:
        return self.num_samples - 1

    @property
    def row_width(self) -> int:
        """Ids of a row of `read`."""
        return self.seq_length + 1

    @property
    def dtype(self) -> np.dtype:
        """Of the rows of `read`."""
        return self.indexed.dtype

    def __getitem__(self, index: int) -> np.ndarray:
        """Return sample `index`, int64 [seq_length + 1]."""
        return np.asarray(self.read([index])[0], dtype=np.int64)

    @property
    def has_labels(self) -> bool:
        """Whether some tokens are not to be predicted, so that `read_labels` differs from `read`."""
        return self.labels is not None or self.packing.is_padded

    def read(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return samples `indices` [len(indices), seq_length + 1], padded by 0, in the dtype of the file."""
        return self._rows(self.indexed, indices, 0, self.indexed.dtype)

    def read_labels(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return labels of samples, int32 or int64 [len(indices), seq_length + 1], at the places of their own tokens.

        IGNORED where a token is not to be predicted.
        """
        source = self.indexed if self.labels is None else self.labels
        return self._rows(source, indices, IGNORED, np.result_type(source.dtype, np.int32))

    def _rows(
        self, source: IndexedDataset, indices: Sequence[int] | np.ndarray, fill: int, dtype: np.dtype
    ) -> np.ndarray:
        samples = self.maps.shuffle_map[np.asarray(indices, dtype=np.intp)].astype(np.intp)
        firsts, lasts = self.maps.sample_map[samples], self.maps.sample_map[samples + 1]  # [n, 2] entry and offset
        if self.packing.is_padded:
            return self._padded_rows(source, firsts[:, 0], lasts[:, 0], fill, dtype)
        entries, before = _ranges(firsts[:, 0], lasts[:, 0])
        documents = self.maps.document_map[entries]
        begins = source.starts(documents)
        stops = begins + source.sizes[documents]
        ends = np.append(before[1:], len(entries)) - 1
        stops[ends] = begins[ends] + lasts[:, 1] + 1
        begins[before] += firsts[:, 1]
        tokens = source.tokens
        pieces = [tokens[begin:stop] for begin, stop in zip(begins.tolist(), stops.tolist(), strict=True)]
        return np.concatenate(pieces).reshape(len(samples), self.seq_length + 1)

    def _padded_rows(
        self, source: IndexedDataset, firsts: np.ndarray, lasts: np.ndarray, fill: int, dtype: np.dtype
    ) -> np.ndarray:
        """Return the documents of entries [firsts, lasts) in rows [n, seq_length + 1]."""
        rows = np.full((len(firsts), self.seq_length + 1), fill, dtype=dtype)
        for row, first, last in zip(rows, firsts.tolist(), lasts.tolist(), strict=True):
            ids = np.concatenate([source[document] for document in self.maps.document_map[first:last].tolist()])
            row[: len(ids)] = ids[: len(row)]
        return rows


def _ranges(firsts: np.ndarray, lasts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of the ranges [firsts, lasts] (inclusive), concatenated, and where each range begins."""
    counts = lasts.astype(np.intp) - firsts + 1
    before = np.cumsum(counts) - counts
    return np.arange(counts.sum()) + np.repeat(firsts - before, counts), before
