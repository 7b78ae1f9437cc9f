"""Statistics of datasets and corpora."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from neox.corpus import read_documents
from neox.data.indexed_dataset import IndexedDataset, Layout, idx_path
from neox.data.sidecar import Sidecar, read_sidecar
from neox.errors import DataError

UNNAMED = "(unnamed)"


@dataclass(frozen=True)
class LengthBin:
    """Number of documents (or sentences) of `low` to `high` tokens (inclusive), and of the tokens in them."""

    low: int
    high: int
    documents: int
    tokens: int


@dataclass(frozen=True)
class DatasetStats:
    """Statistics of one dataset.

    Attributes:
        prefix: Path without `.bin` and `.idx`.
        layout: Layout of the index.
        dtype: Of the token ids.
        documents: Number of documents.
        sequences: Number of sequences: as many as documents, or their sentences.
        tokens: Number of tokens.
        data_bytes: Size of the `.bin`.
        empty: Number of sequences without tokens.
        shortest: Fewest tokens of a sequence; `mean`, `median` and `longest` accordingly.
        histogram: Sequences by their number of tokens, a bin for each power of two.
        sidecar: Sidecar; None for data of other tools.
    """

    prefix: str
    layout: Layout
    dtype: str
    documents: int
    sequences: int
    tokens: int
    data_bytes: int
    empty: int
    shortest: int
    mean: float
    median: int
    longest: int
    histogram: tuple[LengthBin, ...]
    sidecar: Sidecar | None


def dataset_stats(prefix: str | Path) -> DatasetStats:
    """Compute the statistics of a dataset from its index, without reading the tokens.

    Raises:
        DataError: If the dataset is missing or damaged.
    """
    data = IndexedDataset(prefix)
    sizes = np.asarray(data.sizes)
    some = len(sizes) > 0
    return DatasetStats(
        prefix=str(prefix),
        layout=data.layout,
        dtype=data.dtype.name,
        documents=data.num_documents,
        sequences=len(data),
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
    """Count sizes in bins 0, 1, 2-3, 4-7, ...; empty bins at both ends are left out."""
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


@dataclass
class SourceCount:
    """Size of one source.

    Attributes:
        documents: Number of documents.
        text_bytes: UTF-8 bytes of the texts; 0 for a dataset.
        tokens: Number of tokens; 0 for texts.
    """

    documents: int = 0
    text_bytes: int = 0
    tokens: int = 0


def count_sources(
    inputs: Sequence[str | Path], *, key: str = "text", source_key: str = "pile_set_name", skip_bad: int = 0
) -> dict[str, SourceCount]:
    """Count documents by source.

    Args:
        inputs: Files or directories of documents, or prefixes of datasets.
        key: JSON key of the text.
        source_key: Key in `meta` that names a text's source (default: the Pile's); a dataset's source is its prefix.
        skip_bad: Number of bad inputs that may be skipped.

    Raises:
        DataError: If an input is missing, or more are bad than may be skipped.
    """
    counts: dict[str, SourceCount] = {}
    for name in map(str, inputs):
        if idx_path(name).exists():
            data = IndexedDataset(name)
            counts[name] = SourceCount(documents=data.num_documents, tokens=data.num_tokens)
            continue
        if not Path(name).exists():
            raise DataError(f"{name} is neither a file nor a directory of documents, nor the prefix of a dataset")
        for document in read_documents(name, key, skip_bad=skip_bad):
            count = counts.setdefault(str(document.meta.get(source_key, UNNAMED)), SourceCount())
            count.documents += 1
            count.text_bytes += len(document.text.encode("utf-8", "surrogatepass"))
    return counts
