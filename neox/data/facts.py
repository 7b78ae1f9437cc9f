"""What a dataset holds, counted: for people who want to know before they train."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from neox.data.index_format import Layout
from neox.data.indexed_dataset import IndexedDataset
from neox.data.sidecar import Sidecar, read_sidecar


@dataclass(frozen=True)
class LengthBin:
    """Documents of `low` to `high` tokens (both included), and the tokens in them."""

    low: int
    high: int
    documents: int
    tokens: int


@dataclass(frozen=True)
class DatasetFacts:
    """Lengths are in tokens; `histogram` has a bin for each power of two; `sidecar` is None for data from elsewhere."""

    prefix: str
    layout: Layout
    dtype: str
    documents: int
    tokens: int
    data_bytes: int
    empty: int
    shortest: int
    mean: float
    median: int
    longest: int
    histogram: tuple[LengthBin, ...]
    sidecar: Sidecar | None


def dataset_facts(prefix: str | Path) -> DatasetFacts:
    """Count a dataset from its index; the tokens themselves are not read. Raises DataError where it is broken."""
    data = IndexedDataset(prefix)
    sizes = np.asarray(data.sizes)
    some = len(sizes) > 0
    return DatasetFacts(
        prefix=str(prefix),
        layout=data.layout,
        dtype=data.dtype.name,
        documents=data.num_documents,
        tokens=data.num_tokens,
        data_bytes=data.num_tokens * data.dtype.itemsize,
        empty=int(np.count_nonzero(sizes == 0)),
        shortest=int(sizes.min()) if some else 0,
        mean=data.num_tokens / len(sizes) if some else 0.0,
        median=int(np.partition(sizes, len(sizes) // 2)[len(sizes) // 2]) if some else 0,
        longest=int(sizes.max()) if some else 0,
        histogram=_histogram(sizes),
        sidecar=read_sidecar(prefix),
    )


def _histogram(sizes: np.ndarray) -> tuple[LengthBin, ...]:
    """Bins 0, 1, 2-3, 4-7, ...; leading and trailing empty ones are left out."""
    if len(sizes) == 0:
        return ()
    power = np.frexp(sizes.astype(np.float64))[1]  # 0 for 0, 1 for 1, 2 for 2-3, 3 for 4-7, ...
    documents = np.bincount(power)
    tokens = np.bincount(power, weights=sizes)  # exact up to 2^53
    first = int(np.flatnonzero(documents)[0])
    return tuple(
        LengthBin(1 << (p - 1) if p else 0, (1 << p) - 1, int(documents[p]), int(tokens[p]))
        for p in range(first, len(documents))
    )
