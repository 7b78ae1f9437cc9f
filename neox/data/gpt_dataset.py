"""Samples for a GPT: `seq_length + 1` consecutive tokens of the shuffled documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import numpy as np

from neox.data.index_maps import IndexMaps, build_index_maps, content_key
from neox.data.indexed_dataset import IndexedDataset
from neox.data.map_cache import load_or_build
from neox.errors import DataError


class GPTDataset:
    """Samples of `documents` of an indexed dataset, in gpt-neox's order.

    documents: sequence numbers, a range; num_samples: how many the run will ask for (it decides the number of epochs).
    cache_dir: where the maps are kept between runs (None: built in memory).
    `len()` is gpt-neox's: one less than the samples that exist, all of which can be read.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        documents: range,
        num_samples: int,
        seq_length: int,
        seed: int,
        cache_dir: str | Path | None = None,
    ) -> None:
        if documents.step != 1 or not 0 <= documents.start < documents.stop <= len(indexed):
            raise DataError(f"{indexed.prefix} has {len(indexed)} documents; {documents} is not a part of them")
        self.indexed = indexed
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
        key = "" if cache_dir is None else content_key(sizes, documents, **arguments)
        names = tuple(field.name for field in fields(IndexMaps))
        arrays = load_or_build(cache_dir, key, names, lambda: vars(build_index_maps(sizes, documents, **arguments)))
        return IndexMaps(**arrays)

    def __len__(self) -> int:
        return self.num_samples - 1

    def __getitem__(self, index: int) -> np.ndarray:
        """Sample `index` as int64 [seq_length + 1]."""
        out = np.empty((1, self.seq_length + 1), dtype=np.int64)
        self.fill(out, [index])
        return out[0]

    def fill(self, out: np.ndarray, indices: Sequence[int] | np.ndarray) -> None:
        """Write samples `indices` into the rows of `out` [len(indices), seq_length + 1], converted while copied."""
        samples = self.maps.shuffle_map[np.asarray(indices, dtype=np.intp)].astype(np.intp)
        bounds = self.maps.sample_map
        firsts, lasts = bounds[samples].tolist(), bounds[samples + 1].tolist()
        document_map, sizes, tokens = self.maps.document_map, self.indexed.sizes, self.indexed.tokens
        for row, (first, offset), (last, end) in zip(out, firsts, lasts, strict=True):
            documents = document_map[first : last + 1]
            starts = self.indexed.starts(documents)
            if first == last:
                start = int(starts[0]) + offset
                row[:] = tokens[start : start + len(row)]
                continue
            lengths = sizes[documents]
            stops = (starts + lengths).tolist()
            begins = starts.tolist()
            begins[0] += offset
            stops[-1] = begins[-1] + end + 1
            at = 0
            for begin, stop in zip(begins, stops, strict=True):
                row[at : at + stop - begin] = tokens[begin:stop]
                at += stop - begin
