"""Verification of a whole dataset: ids, end-of-document tokens and sidecar."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from neox.data.token_files.columns import column_lines, column_names
from neox.data.token_files.indexed_dataset import IGNORED, IndexedDataset
from neox.data.token_files.sidecar import Sidecar, read_sidecar
from neox.errors import DataError
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


@dataclass(frozen=True)
class _Expected:
    """Properties that the ids should have; None if they are not known.

    Attributes:
        vocab_size: Ids must be below it.
        eod: Id with which documents must end.
        tokenizer_hashes: Hashes of tokenizers of which one must have made the data; any may if there are none.
    """

    vocab_size: int | None
    eod: int | None
    tokenizer_hashes: Collection[str]


@dataclass
class _Found:
    """Counts of one pass over the tokens. Documents are numbered from 0; -1 means none."""

    max_id: int = -1
    first_bad: int = -1
    first_bad_id: int = 0
    bad_ids: int = 0
    without_end: int = 0
    first_without_end: int = -1
    inner_ends: int = 0
    crc32: int = 0


def verify_dataset(
    prefix: str | Path,
    *,
    vocab_size: int | None = None,
    eod: int | None = None,
    tokenizer_hashes: Collection[str] = (),
) -> Verification:
    """Read and check every id of a dataset, 16 million at a time. In labels, only the counted ids are checked.

    Args:
        prefix: Path without `.bin` and `.idx`.
        vocab_size: Ids must be below it (default: the sidecar's).
        eod: Id with which documents must end (default: the sidecar's, if it was appended to documents).
        tokenizer_hashes: Hashes of which the sidecar must have one; none skip this comparison.

    Raises:
        DataError: If sizes, pointers and file lengths contradict each other, so that nothing can be read.
    """
    data = IndexedDataset(prefix)
    sidecar = read_sidecar(prefix)
    labels = False
    if sidecar is not None:
        if vocab_size is None:
            vocab_size = sidecar.vocab_size
        if eod is None and sidecar.append_eod:
            eod = sidecar.eod
        labels = bool(sidecar.settings.get("labels"))
    if labels:
        eod = None  # the end of a document may not be counted
    expected = _Expected(vocab_size, eod, tokenizer_hashes)
    found = _pass_over(data, expected, labels=labels)
    problems = [*_problems_of_ids(found, expected), *_problems_of_sidecar(data, sidecar, found, expected)]
    problems += _problems_of_columns(data, sidecar)
    return Verification(
        str(prefix),
        tuple(problems),
        tuple(_notes(data, sidecar, found, expected)),
        data.num_documents,
        data.num_tokens,
        found.max_id,
    )


def _pass_over(data: IndexedDataset, expected: _Expected, *, labels: bool) -> _Found:
    found = _Found()
    with progress(f"verify {data.prefix}", data.num_tokens, "tokens") as bar:
        for first, sizes, tokens in data.blocks():
            if len(tokens):
                ids = np.where(tokens == IGNORED, 0, tokens) if labels else tokens
                _check_ids(found, first, sizes, ids, expected.vocab_size)
            if expected.eod is not None:
                _check_ends(found, first, sizes, tokens, expected.eod)
            found.crc32 = zlib.crc32(np.ascontiguousarray(tokens).data, found.crc32)
            bar.update(len(tokens))
    return found


def _check_ids(found: _Found, first: int, sizes: np.ndarray, ids: np.ndarray, vocab_size: int | None) -> None:
    """Count the ids that are too high or too low, in documents from number `first` on."""
    highest = int(ids.max())
    lowest = int(ids.min())
    found.max_id = max(found.max_id, highest)
    if lowest >= 0 and (vocab_size is None or highest < vocab_size):
        return
    is_bad = ids < 0
    if vocab_size is not None:
        is_bad |= ids >= vocab_size
    bad = np.flatnonzero(is_bad)
    if found.first_bad < 0:
        ends = np.cumsum(sizes, dtype=np.int64)
        found.first_bad = first + int(np.searchsorted(ends, bad[0], side="right"))
        found.first_bad_id = int(ids[bad[0]])
    found.bad_ids += len(bad)


def _check_ends(found: _Found, first: int, sizes: np.ndarray, tokens: np.ndarray, eod: int) -> None:
    """Count the documents without an end, and the ends inside documents, from document number `first` on."""
    last = np.cumsum(sizes, dtype=np.int64) - 1
    ended = np.zeros(len(sizes), dtype=bool)
    filled = sizes > 0
    ended[filled] = tokens[last[filled]] == eod
    without = np.flatnonzero(~ended)
    if len(without) and found.first_without_end < 0:
        found.first_without_end = first + int(without[0])
    found.without_end += len(without)
    found.inner_ends += int(np.count_nonzero(tokens == eod)) - int(ended.sum())


def _problems_of_ids(found: _Found, expected: _Expected) -> Iterator[str]:
    if found.bad_ids:
        limit = "below 0"
        if expected.vocab_size is not None:
            limit = f"outside 0 to {expected.vocab_size - 1}"
        yield f"{found.bad_ids:,} ids are {limit}, the first, {found.first_bad_id}, in document {found.first_bad:,}"
    if found.without_end:
        yield (
            f"{found.without_end:,} documents do not end with the end-of-document id {expected.eod}, the first is "
            f"document {found.first_without_end:,}"
        )


def _problems_of_sidecar(
    data: IndexedDataset, sidecar: Sidecar | None, found: _Found, expected: _Expected
) -> Iterator[str]:
    if sidecar is None:
        return
    for what, claim, real in (
        ("documents", sidecar.documents, data.num_documents),
        ("tokens", sidecar.tokens, data.num_tokens),
        ("as its largest id", max(sidecar.max_id, 0), max(found.max_id, 0)),
    ):
        if claim != real:
            yield f"the .json has {claim:,} {what}, the files have {real:,}"
    if sidecar.crc32 is not None and sidecar.crc32 != found.crc32:
        yield f"the ids have changed since they were written: checksum {found.crc32:08x}, not {sidecar.crc32:08x}"
    wanted = expected.tokenizer_hashes
    if wanted and sidecar.tokenizer_hash not in wanted:
        made_with = f"{sidecar.tokenizer_type} {sidecar.tokenizer_hash[:12]}"
        yield f"it was made with another tokenizer: {made_with}, not {' or '.join(digest[:12] for digest in wanted)}"


def _problems_of_columns(data: IndexedDataset, sidecar: Sidecar | None) -> Iterator[str]:
    if not column_names(sidecar):
        return
    try:
        for _ in column_lines(data.prefix):
            pass
    except DataError as error:
        yield str(error)


def _notes(data: IndexedDataset, sidecar: Sidecar | None, found: _Found, expected: _Expected) -> Iterator[str]:
    if sidecar is None:
        yield "there is no .json: the tokenizer of the data is unknown"
    if expected.vocab_size is None:
        yield f"the vocabulary size is unknown: ids (up to {found.max_id}) were only checked not to be negative"
    if expected.eod is None:
        yield "the ends of documents were not checked: it is labels or sentences, or the end-of-document id is unknown"
    elif found.inner_ends:
        yield f"{found.inner_ends:,} end-of-document ids are inside documents"
    empty = int(np.count_nonzero(np.asarray(data.sizes) == 0))
    if empty:
        yield f"{empty:,} documents are empty"
