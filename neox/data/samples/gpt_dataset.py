"""Samples of a token dataset for causal language modelling, and the division of documents by `split`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from neox.config.sections.data import split_shares
from neox.data.samples.fill_in_middle import FillInMiddle
from neox.data.samples.index_maps import IndexMaps, build_index_maps, content_key
from neox.data.samples.map_cache import load_or_build
from neox.data.samples.packing import (
    DocumentHeads,
    DocumentPieces,
    Packing,
    build_best_fit_maps,
    build_whole_document_maps,
    padded_layout,
    padded_rows,
    usable_documents,
)
from neox.data.samples.rows import RowLayout, SampleCuts, TokenRows, TrainingDocuments
from neox.data.token_files.indexed_dataset import IGNORED, IndexedDataset
from neox.errors import DataError


def split_documents(split: str, documents: int) -> tuple[range, range, range]:
    """Divide the documents [0, documents) by the shares in `split`, rounded as in NeoX.

    Raises:
        ConfigError: As `split_shares`.
    """
    edges = [0]
    for share in split_shares(split):
        edges.append(edges[-1] + round(share * documents))
    # Shift all edges so that the last one is `documents`. The first range absorbs the rounding, as in gpt-neox.
    surplus = edges[-1] - documents
    edges[1:] = [max(0, edge - surplus) for edge in edges[1:]]
    return range(edges[0], edges[1]), range(edges[1], edges[2]), range(edges[2], edges[3])


class GPTDataset:
    """Samples of `seq_length + 1` tokens from shuffled documents, in gpt-neox's order.

    By default the documents of all epochs, in random order, are joined to one stream of tokens, and the stream is cut
    into samples:

        stream    | document 7 | document 2 |       document 9       | document 0 | ...
        samples   |------ sample 0 -----|------ sample 1 -----|------ sample 2 -----| ...

    Neighbours share one token: the last target of a sample is the first input of the next one. Samples are then
    shuffled. With another `packing`, samples are whole documents and padding (`neox.data.samples.packing` shows all).

    Sample i of the run goes through the maps to its row:

        shuffle_map[i] -> n        its number before samples were shuffled
        sample_map[n]              the entry where it starts, and the token there; it ends where n + 1 starts
        document_map[entries]      the documents of its entries
        indexed[document]          their tokens, which are joined to the row

    `len()` is `num_samples - 1`, as in gpt-neox; the last sample can be read all the same.

    Attributes:
        indexed: Token dataset.
        documents: Numbers of the documents that are used.
        requested_samples: Number of samples that the run asked for, which sets how many epochs are built; None is one.
        seed: Seed of the shuffles.
        cache_dir: Directory that keeps the maps between runs; None if they are in memory.
        labels: Labels of the tokens, with the same sequences; IGNORED for a token that is not predicted. None if each
            token is its own label.
        packing: The way documents become samples.
        pieces: Pieces of documents that padded samples hold; None if documents are joined.
        rows: Reader of samples of joined documents.
        seq_length: Number of tokens of a sample's input.
        num_samples: Number of samples that can be read.
        maps: Index maps.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        documents: range,
        num_samples: int | None,
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
            documents: Numbers of the documents to use, with step 1.
            num_samples: Number of samples that the run asks for, which sets how many epochs are built; None is one.
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
        self.documents = documents
        self.requested_samples = num_samples
        self.seed = seed
        self.cache_dir = None if cache_dir is None else Path(cache_dir)
        self.labels = labels
        self.packing = packing or Packing()
        assert fill_in_middle is None or not self.packing.is_padded
        self.rows = TokenRows(indexed, labels, fill_in_middle, seq_length + 1)
        self.seq_length = seq_length
        self.pieces: DocumentHeads | DocumentPieces | None = None
        self.maps = self._build_maps(num_samples)
        self.num_samples = len(self.maps.shuffle_map)
        if self.num_samples == 0:
            raise DataError(
                f"{indexed.prefix}: documents {documents.start} to {documents.stop} hold fewer than seq_length + 1 = "
                f"{seq_length + 1} tokens, not one sample; use more data or a shorter seq_length"
            )

    def _build_maps(self, num_samples: int | None) -> IndexMaps:
        """Build or load the index maps for a number of samples, or for one pass."""
        sizes = self.indexed.sizes
        documents = self.documents
        settings: dict[str, Any] = {"num_samples": num_samples, "seq_length": self.seq_length, "seed": self.seed}
        impl = self.packing.impl
        packing_key = b""
        build: Callable[[], IndexMaps]
        if impl == "packed":
            build = partial(build_index_maps, sizes, documents, **settings)
        else:
            usable = usable_documents(
                self.indexed,
                self.labels,
                documents,
                self.seq_length,
                impl=impl,
                allow_chopped=self.packing.allow_chopped,
            )
            packing_key = impl.encode() + np.packbits(usable).tobytes()
            if impl == "best_fit":
                pieces = DocumentPieces.of(sizes, usable, documents, self.seq_length)
                build = partial(build_best_fit_maps, pieces, num_samples=num_samples, seed=self.seed)
                self.pieces = pieces
            else:
                build = partial(build_whole_document_maps, sizes, documents, usable, impl=impl, **settings)
                self.pieces = DocumentHeads(sizes, self.row_width)
        if self.cache_dir is None:
            return build()
        key = content_key(sizes, documents, **settings, packing=packing_key)
        names = tuple(field.name for field in fields(IndexMaps))
        return IndexMaps(**load_or_build(self.cache_dir, key, names, lambda: vars(build())))

    def __len__(self) -> int:
        return self.num_samples - 1

    @property
    def training_documents(self) -> TrainingDocuments:
        """The dataset and documents that the samples are cut from."""
        return TrainingDocuments(self.rows, self.documents, self.cache_dir)

    @property
    def passes(self) -> int:
        """Number of passes over the documents."""
        return len(self.maps.document_map) // len(self.documents)

    @property
    def row_width(self) -> int:
        """Number of ids in a row of `read`."""
        return self.seq_length + 1

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the rows of `read`."""
        return self.rows.dtype

    def __getitem__(self, index: int) -> np.ndarray:
        """Return one sample, int64 [seq_length + 1]."""
        return np.asarray(self.read([index])[0], dtype=np.int64)

    @property
    def has_labels(self) -> bool:
        """Whether some tokens are not predicted, so that the labels differ from the tokens."""
        return self.labels is not None or self.packing.is_padded

    def read(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the token ids of samples, [len(indices), seq_length + 1]. Padding is 0."""
        numbers = self._numbers_before_shuffle(indices)
        if self.pieces is None:
            return self.rows.read(self._cuts(numbers))
        return padded_rows(self.indexed, self.pieces, self.maps, numbers, 0, self.dtype)

    def read_labels(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the label of each token of samples, IGNORED for a token that is not predicted.

        Returns:
            Labels, int32 or int64 [len(indices), seq_length + 1].
        """
        numbers = self._numbers_before_shuffle(indices)
        if self.pieces is None:
            return self.rows.read_labels(self._cuts(numbers))
        source = self.rows.label_source  # the labels, or the tokens themselves if there are none
        dtype = self.rows.label_dtype
        return padded_rows(source, self.pieces, self.maps, numbers, IGNORED, dtype, shared=IGNORED)

    def layout(self, indices: Sequence[int] | np.ndarray) -> RowLayout:
        """Return where the documents of samples start, and where their padding does."""
        numbers = self._numbers_before_shuffle(indices)
        if self.pieces is None:
            return self.rows.layout(self._cuts(numbers))
        return padded_layout(self.pieces, self.maps, numbers)

    def _cuts(self, numbers: np.ndarray) -> SampleCuts:
        """Return where samples are cut from the joined documents; the next sample starts with the last token."""
        sample_map = self.maps.sample_map
        return SampleCuts(self.maps.document_map, sample_map[numbers], sample_map[numbers + 1], numbers)

    def _numbers_before_shuffle(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the numbers that samples have in `sample_map`."""
        return self.maps.shuffle_map[np.asarray(indices, dtype=np.intp)].astype(np.intp)
