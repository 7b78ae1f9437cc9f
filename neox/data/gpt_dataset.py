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
        return self.read([index])[0].astype(np.int64)

    def read(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Samples `indices` as [len(indices), seq_length + 1], in the dtype of the file."""
        samples = self.maps.shuffle_map[np.asarray(indices, dtype=np.intp)].astype(np.intp)
        firsts, lasts = self.maps.sample_map[samples], self.maps.sample_map[samples + 1]  # [n, 2] entry and offset
        entries, before = _ranges(firsts[:, 0], lasts[:, 0])
        documents = self.maps.document_map[entries]
        begins = self.indexed.starts(documents)
        stops = begins + self.indexed.sizes[documents]
        ends = np.append(before[1:], len(entries)) - 1
        stops[ends] = begins[ends] + lasts[:, 1] + 1
        begins[before] += firsts[:, 1]
        tokens = self.indexed.tokens
        pieces = [tokens[begin:stop] for begin, stop in zip(begins.tolist(), stops.tolist(), strict=True)]
        return np.concatenate(pieces).reshape(len(samples), self.seq_length + 1)


def _ranges(firsts: np.ndarray, lasts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All numbers of the ranges [firsts, lasts], one range after the other, and where each begins in that list."""
    counts = lasts.astype(np.intp) - firsts + 1
    before = np.cumsum(counts) - counts
    return np.arange(counts.sum()) + np.repeat(firsts - before, counts), before
