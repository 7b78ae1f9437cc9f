"""Reading a whole dataset to see whether it is what it claims: ids, end-of-document, sidecar."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from neox.data.indexed_dataset import IndexedDataset
from neox.data.sidecar import Sidecar, read_sidecar
from neox.log import progress

_PIECE_TOKENS = 1 << 24


@dataclass(frozen=True)
class Verification:
    """problems: what makes the data unfit, one sentence each. notes: what a reader may want to know.

    documents, tokens, max_id: as found in the files.
    """

    prefix: str
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    documents: int
    tokens: int
    max_id: int


@dataclass
class _Found:
    """Counts of one pass over the tokens; documents are numbered from 0, -1 means none."""

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
    """Read every id of a dataset. What is not given is taken from the sidecar.

    vocab_size: ids must be below it. eod: documents must end with it (taken from a sidecar only where that says so).
    tokenizer_hash: must be the sidecar's. Memory: a piece of 16 million tokens at a time.
    Raises DataError where sizes, pointers and file lengths contradict each other, so that nothing can be read.
    """
    data, sidecar = IndexedDataset(prefix), read_sidecar(prefix)
    if sidecar is not None:
        vocab_size = sidecar.vocab_size if vocab_size is None else vocab_size
        eod = sidecar.eod if eod is None and sidecar.append_eod else eod
    found = _pass_over(data, vocab_size, eod)
    problems = [*_id_problems(found, vocab_size), *_end_problems(found, eod)]
    problems += [] if sidecar is None else _sidecar_problems(sidecar, data, found, tokenizer_hash)
    return Verification(
        str(prefix),
        tuple(problems),
        tuple(_notes(data, sidecar, found, vocab_size, eod)),
        data.num_documents,
        data.num_tokens,
        found.max_id,
    )


def _pass_over(data: IndexedDataset, vocab_size: int | None, eod: int | None) -> _Found:
    found = _Found()
    with progress(f"verify {data.prefix}", data.num_tokens, "tokens") as bar:
        for first, sizes, tokens in pieces(data):
            if len(tokens):
                _look_at_ids(found, first, sizes, tokens, vocab_size)
            if eod is not None:
                _look_at_ends(found, first, sizes, tokens, eod)
            found.crc32 = zlib.crc32(np.ascontiguousarray(tokens), found.crc32)
            bar.update(len(tokens))
    return found


def pieces(data: IndexedDataset) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Walk a dataset: (first sequence, sizes, their tokens), about 16 million tokens at a time, whole sequences."""
    first = start = 0
    while first < len(data):
        sizes = np.asarray(data.sizes[first : first + _PIECE_TOKENS // 16])
        ends = np.cumsum(sizes, dtype=np.int64)
        take = max(1, int(np.searchsorted(ends, _PIECE_TOKENS, side="right")))
        stop = start + int(ends[take - 1])
        yield first, sizes[:take], data.tokens[start:stop]
        first, start = first + take, stop


def _look_at_ids(found: _Found, first: int, sizes: np.ndarray, tokens: np.ndarray, vocab_size: int | None) -> None:
    highest, lowest = int(tokens.max()), int(tokens.min())
    found.max_id = max(found.max_id, highest)
    if lowest >= 0 and (vocab_size is None or highest < vocab_size):
        return
    bad = np.flatnonzero((tokens < 0) | (tokens >= (vocab_size if vocab_size is not None else np.inf)))
    if found.first_bad < 0:
        found.first_bad = first + int(np.searchsorted(np.cumsum(sizes, dtype=np.int64), bad[0], side="right"))
        found.first_bad_id = int(tokens[bad[0]])
    found.bad_ids += len(bad)


def _look_at_ends(found: _Found, first: int, sizes: np.ndarray, tokens: np.ndarray, eod: int) -> None:
    ends = np.cumsum(sizes, dtype=np.int64) - 1
    ended = np.zeros(len(sizes), dtype=bool)
    some = sizes > 0
    ended[some] = tokens[ends[some]] == eod
    without = np.flatnonzero(~ended)
    if len(without) and found.first_without_end < 0:
        found.first_without_end = first + int(without[0])
    found.without_end += len(without)
    found.inner_ends += int(np.count_nonzero(tokens == eod)) - int(ended.sum())


def _id_problems(found: _Found, vocab_size: int | None) -> Iterator[str]:
    if found.bad_ids:
        limit = "below 0" if vocab_size is None else f"outside 0 to {vocab_size - 1}"
        yield f"{found.bad_ids:,} ids are {limit}, the first, {found.first_bad_id}, in document {found.first_bad:,}"


def _end_problems(found: _Found, eod: int | None) -> Iterator[str]:
    if found.without_end:
        yield (
            f"{found.without_end:,} documents do not end with the end-of-document id {eod}, the first is document "
            f"{found.first_without_end:,}"
        )


def _sidecar_problems(sidecar: Sidecar, data: IndexedDataset, found: _Found, tokenizer_hash: str | None) -> list[str]:
    claims = (
        ("documents", sidecar.documents, data.num_documents),
        ("tokens", sidecar.tokens, data.num_tokens),
        ("as its largest id", sidecar.max_id, found.max_id),
    )
    problems = [
        f"the .json says {claim:,} {what}, the files have {real:,}" for what, claim, real in claims if claim != real
    ]
    if sidecar.crc32 is not None and sidecar.crc32 != found.crc32:
        problems.append(
            f"the ids are not those that were written: their checksum is {found.crc32:08x}, not {sidecar.crc32:08x}"
        )
    if tokenizer_hash is not None and tokenizer_hash != sidecar.tokenizer_hash:
        problems.append(
            f"it was made with another tokenizer: {sidecar.tokenizer_type} {sidecar.tokenizer_hash[:12]}, not "
            f"{tokenizer_hash[:12]}"
        )
    return problems


def _notes(
    data: IndexedDataset, sidecar: Sidecar | None, found: _Found, vocab_size: int | None, eod: int | None
) -> Iterator[str]:
    if sidecar is None:
        yield "there is no .json beside it: which tokenizer made it is not known"
    if vocab_size is None:
        yield f"the vocabulary is not known, so ids (up to {found.max_id}) are only known not to be negative"
    if eod is None:
        yield "the end-of-document id is not known, so ends were not looked at"
    elif found.inner_ends:
        yield f"{found.inner_ends:,} end-of-document ids stand inside documents"
    empty = int(np.count_nonzero(np.asarray(data.sizes) == 0))
    if empty:
        yield f"{empty:,} documents are empty"
