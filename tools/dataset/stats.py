"""Statistics of datasets and corpora."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from neox.corpus import read_documents
from neox.data.token_files.indexed_dataset import IndexedDataset, IndexLayout, idx_path
from neox.data.token_files.sidecar import Sidecar, read_sidecar
from neox.errors import DataError

UNNAMED = "(unnamed)"


@dataclass(frozen=True)
class LengthBin:
    """Documents, or sentences, whose number of tokens is in a range.

    Attributes:
        low: Fewest tokens.
        high: Most tokens.
        documents: Number of documents or sentences.
        tokens: Number of their tokens.
    """

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
        dtype: Type of the token ids.
        documents: Number of documents.
        sequences: Number of sequences: one for each document, or its sentences.
        tokens: Number of tokens.
        data_bytes: Size of the `.bin`.
        empty: Number of sequences without tokens.
        shortest: Fewest tokens of a sequence.
        mean: Mean number of tokens of a sequence.
        median: Median number of tokens of a sequence.
        longest: Most tokens of a sequence.
        histogram: Sequences by their number of tokens, with a bin for each power of two.
        sidecar: Sidecar of the dataset; None if another tool made it.
    """

    prefix: str
    layout: IndexLayout
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
    lengths = sizes if len(sizes) else np.zeros(1, dtype=np.int32)
    return DatasetStats(
        prefix=str(prefix),
        layout=data.layout,
        dtype=data.dtype.name,
        documents=data.num_documents,
        sequences=len(data),
        tokens=data.num_tokens,
        data_bytes=data.num_tokens * data.dtype.itemsize,
        empty=int(np.count_nonzero(sizes == 0)),
        shortest=int(lengths.min()),
        mean=data.num_tokens / len(lengths),
        median=int(np.partition(lengths, len(lengths) // 2)[len(lengths) // 2]),
        longest=int(lengths.max()),
        histogram=_histogram(sizes),
        sidecar=read_sidecar(prefix),
    )


def _histogram(sizes: np.ndarray) -> tuple[LengthBin, ...]:
    """Count sizes in bins 0, 1, 2-3, 4-7, ...; empty bins at both ends are left out."""
    if len(sizes) == 0:
        return ()
    _, powers = np.frexp(sizes.astype(np.float64))  # 0 for 0, 1 for 1, 2 for 2-3, 3 for 4-7, ...
    documents = np.bincount(powers)
    tokens = np.bincount(powers, weights=sizes)  # exact up to 2^53
    first = int(np.flatnonzero(documents)[0])
    bins = []
    for power in range(first, len(documents)):
        low = (1 << power) >> 1
        high = (1 << power) - 1
        bins.append(LengthBin(low, high, int(documents[power]), int(tokens[power])))
    return tuple(bins)


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
        source_key: Key in `meta` that names the source of a text; the default is the Pile's. The source of a dataset is
            its prefix.
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
