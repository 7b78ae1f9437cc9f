"""Verification of a whole dataset: ids, end-of-document tokens and sidecar."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from neox.data.indexed_dataset import IGNORED, IndexedDataset
from neox.data.sidecar import Sidecar, read_sidecar
from neox.log import progress


@dataclass(frozen=True)
class Verification:
    """Result of a verification.

    Attributes:
        prefix: Path without `.bin` and `.idx`.
        problems: Defects that make the data unusable, one sentence each.
        notes: Other observations.
        documents: Number of documents found.
        tokens: Number of tokens found.
        max_id: Largest id found, -1 without tokens.
    """

    prefix: str
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    documents: int
    tokens: int
    max_id: int


@dataclass
class _Counts:
    """Counts of one pass over the tokens; documents are numbered from 0, and -1 means none."""

    max_id: int = -1
    first_bad: int = -1
    first_bad_id: int = 0
    bad_ids: int = 0
    without_end: int = 0
    first_without_end: int = -1
    inner_ends: int = 0
    crc32: int = 0


def verify_dataset(
    prefix: str | Path, *, vocab_size: int | None = None, eod: int | None = None, tokenizer_hash: str | None = None
) -> Verification:
    """Read and check every id of a dataset, 16 million at a time; of labels, as their sidecar says, the counted ones.

    Args:
        prefix: Path without `.bin` and `.idx`.
        vocab_size: Limit of the ids (default: the sidecar's).
        eod: Id with which documents must end (default: the sidecar's, if it was appended to documents).
        tokenizer_hash: Hash that the sidecar must have; None skips this comparison.

    Raises:
        DataError: If sizes, pointers and file lengths contradict each other, so that nothing can be read.
    """
    data, sidecar = IndexedDataset(prefix), read_sidecar(prefix)
    if sidecar is not None:
        vocab_size = sidecar.vocab_size if vocab_size is None else vocab_size
        eod = sidecar.eod if eod is None and sidecar.append_eod else eod
    labels = sidecar is not None and bool(sidecar.settings.get("labels"))
    eod = None if labels else eod
    counts = _pass_over(data, vocab_size, eod, labels=labels)
    return Verification(
        str(prefix),
        tuple(_problems(data, sidecar, counts, vocab_size, eod, tokenizer_hash)),
        tuple(_notes(data, sidecar, counts, vocab_size, eod)),
        data.num_documents,
        data.num_tokens,
        counts.max_id,
    )


def _pass_over(data: IndexedDataset, vocab_size: int | None, eod: int | None, *, labels: bool) -> _Counts:
    counts = _Counts()
    with progress(f"verify {data.prefix}", data.num_tokens, "tokens") as bar:
        for first, sizes, tokens in data.pieces():
            if len(tokens):
                _check_ids(
                    counts, first, sizes, np.where(tokens == IGNORED, 0, tokens) if labels else tokens, vocab_size
                )
            if eod is not None:
                _check_ends(counts, first, sizes, tokens, eod)
            counts.crc32 = zlib.crc32(np.ascontiguousarray(tokens).data, counts.crc32)
            bar.update(len(tokens))
    return counts


def _check_ids(counts: _Counts, first: int, sizes: np.ndarray, tokens: np.ndarray, vocab_size: int | None) -> None:
    highest, lowest = int(tokens.max()), int(tokens.min())
    counts.max_id = max(counts.max_id, highest)
    if lowest >= 0 and (vocab_size is None or highest < vocab_size):
        return
    bad = np.flatnonzero((tokens < 0) | (tokens >= (vocab_size if vocab_size is not None else np.inf)))
    if counts.first_bad < 0:
        counts.first_bad = first + int(np.searchsorted(np.cumsum(sizes, dtype=np.int64), bad[0], side="right"))
        counts.first_bad_id = int(tokens[bad[0]])
    counts.bad_ids += len(bad)


def _check_ends(counts: _Counts, first: int, sizes: np.ndarray, tokens: np.ndarray, eod: int) -> None:
    ends = np.cumsum(sizes, dtype=np.int64) - 1
    ended = np.zeros(len(sizes), dtype=bool)
    some = sizes > 0
    ended[some] = tokens[ends[some]] == eod
    without = np.flatnonzero(~ended)
    if len(without) and counts.first_without_end < 0:
        counts.first_without_end = first + int(without[0])
    counts.without_end += len(without)
    counts.inner_ends += int(np.count_nonzero(tokens == eod)) - int(ended.sum())


def _problems(
    data: IndexedDataset,
    sidecar: Sidecar | None,
    counts: _Counts,
    vocab_size: int | None,
    eod: int | None,
    tokenizer_hash: str | None,
) -> Iterator[str]:
    if counts.bad_ids:
        limit = "below 0" if vocab_size is None else f"outside 0 to {vocab_size - 1}"
        yield f"{counts.bad_ids:,} ids are {limit}, the first, {counts.first_bad_id}, in document {counts.first_bad:,}"
    if counts.without_end:
        yield (
            f"{counts.without_end:,} documents do not end with the end-of-document id {eod}, the first is document "
            f"{counts.first_without_end:,}"
        )
    if sidecar is None:
        return
    for what, claim, real in (
        ("documents", sidecar.documents, data.num_documents),
        ("tokens", sidecar.tokens, data.num_tokens),
        ("as its largest id", max(sidecar.max_id, 0), max(counts.max_id, 0)),
    ):
        if claim != real:
            yield f"the .json has {claim:,} {what}, the files have {real:,}"
    if sidecar.crc32 is not None and sidecar.crc32 != counts.crc32:
        yield f"the ids have changed since they were written: checksum {counts.crc32:08x}, not {sidecar.crc32:08x}"
    if tokenizer_hash is not None and tokenizer_hash != sidecar.tokenizer_hash:
        made_with = f"{sidecar.tokenizer_type} {sidecar.tokenizer_hash[:12]}"
        yield f"it was made with another tokenizer: {made_with}, not {tokenizer_hash[:12]}"


def _notes(
    data: IndexedDataset, sidecar: Sidecar | None, counts: _Counts, vocab_size: int | None, eod: int | None
) -> Iterator[str]:
    if sidecar is None:
        yield "there is no .json: the tokenizer of the data is unknown"
    if vocab_size is None:
        yield f"the vocabulary size is unknown: ids (up to {counts.max_id}) were only checked not to be negative"
    if eod is None:
        yield "the ends of documents were not checked: it is labels or sentences, or the end-of-document id is unknown"
    elif counts.inner_ends:
        yield f"{counts.inner_ends:,} end-of-document ids are inside documents"
    empty = int(np.count_nonzero(np.asarray(data.sizes) == 0))
    if empty:
        yield f"{empty:,} documents are empty"
