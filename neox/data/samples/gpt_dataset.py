"""Samples of a token dataset for causal language modelling, and the division of documents by `split`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path

import numpy as np

from neox.config.sections.data import split_shares
from neox.data.samples.best_fit import DocumentPieces, best_fit_rows, build_best_fit_maps
from neox.data.samples.fill_in_middle import FillInMiddle
from neox.data.samples.index_maps import IndexMaps, build_index_maps, content_key, load_or_build
from neox.data.samples.packing import Packing, build_padded_maps, padded_rows, usable_documents
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
    shuffled. With another `packing`, samples are whole documents and padding.

    `len()` is `num_samples - 1`, as in gpt-neox; the last sample can be read all the same.

    Attributes:
        indexed: Token dataset.
        documents: Numbers of the documents that are used.
        requested_samples: Number of samples that the run asked for, which sets how many epochs are built.
        seed: Seed of the shuffles.
        cache_dir: Directory that keeps the maps between runs; None if they are in memory.
        labels: Labels of the tokens, with the same sequences; IGNORED for a token that is not predicted. None if each
            token is its own label.
        packing: The way documents become samples.
        pieces: Pieces of documents, with the packing `best_fit`.
        rows: Reader of samples of joined documents.
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
            documents: Numbers of the documents to use, with step 1.
            num_samples: Number of samples that the run asks for, which sets how many epochs are built.
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
        self.pieces: DocumentPieces | None = None
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
        packing_key = b""
        if self.packing.is_padded:
            usable = self._usable(documents)
            if self.packing.impl == "best_fit":
                self.pieces = DocumentPieces.of(sizes, usable, documents, self.seq_length)
                build = partial(build_best_fit_maps, usable=usable)
            else:
                build = partial(build_padded_maps, usable=usable, impl=self.packing.impl)
            packing_key = self.packing.impl.encode() + np.packbits(usable).tobytes()
        if cache_dir is None:
            return build(sizes, documents, **settings)
        key = content_key(sizes, documents, **settings, packing=packing_key)
        names = tuple(field.name for field in fields(IndexMaps))
        arrays = load_or_build(cache_dir, key, names, lambda: vars(build(sizes, documents, **settings)))
        return IndexMaps(**arrays)

    def _usable(self, documents: range) -> np.ndarray:
        """Return which documents can be in a sample, bool [documents]."""
        read = self.seq_length
        if self.packing.impl == "best_fit":  # reads documents to their end
            read = max(read, int(self.indexed.sizes.max()))
        return usable_documents(self.indexed, self.labels, documents, read, allow_chopped=self.packing.allow_chopped)

    def __len__(self) -> int:
        return self.num_samples - 1

    @property
    def part(self) -> TrainingDocuments:
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
        numbers = self._numbers_in_stream(indices)
        if self.pieces is not None:
            return best_fit_rows(self.indexed, self.pieces, self.maps, numbers, 0, self.dtype)
        if self.packing.is_padded:
            return padded_rows(self.indexed, self.maps, numbers, self.row_width, 0, self.dtype)
        return self.rows.read(self._cuts(numbers))

    def read_labels(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the label of each token of samples, IGNORED for a token that is not predicted.

        Returns:
            Labels, int32 or int64 [len(indices), seq_length + 1].
        """
        numbers = self._numbers_in_stream(indices)
        if self.packing.is_padded:
            source = self.rows.label_source  # the labels, or the tokens themselves if there are none
            if self.pieces is not None:
                return best_fit_rows(
                    source, self.pieces, self.maps, numbers, IGNORED, self.rows.label_dtype, shared=IGNORED
                )
            return padded_rows(source, self.maps, numbers, self.row_width, IGNORED, self.rows.label_dtype)
        return self.rows.read_labels(self._cuts(numbers))

    def layout(self, indices: Sequence[int] | np.ndarray) -> RowLayout:
        """Return where the documents of samples start, and where their padding does."""
        numbers = self._numbers_in_stream(indices)
        if not self.packing.is_padded:
            return self.rows.layout(self._cuts(numbers))
        firsts = self.maps.sample_map[numbers, 0].tolist()
        ends = self.maps.sample_map[numbers + 1, 0].tolist()
        pieces = []
        for first, end in zip(firsts, ends, strict=True):
            entries = self.maps.document_map[first:end]
            sizes = self.indexed.sizes[entries] if self.pieces is None else self.pieces.lengths(entries)
            pieces.append(sizes.tolist())
        return RowLayout.of(pieces, self.row_width)

    def _cuts(self, numbers: np.ndarray) -> SampleCuts:
        """Return where the samples with these numbers in the stream start and end."""
        sample_map = self.maps.sample_map
        return SampleCuts(self.maps.document_map, sample_map[numbers], sample_map[numbers + 1], numbers)

    def _numbers_in_stream(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the numbers that samples have in the stream, before samples are shuffled."""
        return self.maps.shuffle_map[np.asarray(indices, dtype=np.intp)].astype(np.intp)
