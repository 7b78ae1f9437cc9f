"""Resumable writing and merging of token datasets."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Literal, NotRequired, TypedDict

import numpy as np

from neox.data.indexed_dataset import (
    IGNORED,
    IndexedDataset,
    Layout,
    bin_path,
    dtype_code,
    idx_path,
    index_parts,
    json_path,
)
from neox.data.sidecar import joined_sidecar, read_sidecar, write_sidecar
from neox.errors import DataError, os_errors
from neox.files import fsync_file, replace_file
from neox.log import get_logger
from neox.resume import open_at

_log = get_logger(__name__)
_DOCUMENTS = 1 << 16  # of several sequences, merged at once


class Totals(TypedDict):
    """Amount of data of a dataset.

    Attributes:
        documents: Number of documents.
        tokens: Number of tokens.
        max_id: Largest id, -1 before the first.
        crc32: Checksum of the bytes of the ids, in the end of the `.bin`.
    """

    documents: int
    tokens: int
    max_id: int
    crc32: int


class BuilderState(Totals):
    """Amount of data written, as plain JSON; part of resumable state on disk.

    Attributes:
        sequences: Number of sequences, where documents have several; else absent.
    """

    sequences: NotRequired[int]


class IndexedDatasetBuilder:
    """Writer of a token dataset: append documents, then `finalize`; until then only `PREFIX.*.partial` files exist.

    Document lengths are streamed to a file too, so that memory does not grow with the number of documents. As a context
    manager it finalizes, or keeps the partial files after an exception, so that a later run can resume.
    """

    def __init__(
        self,
        prefix: str | Path,
        dtype: np.dtype | type,
        *,
        impl: Literal["mmap", "cached", "lazy"] = "mmap",
        resume: BuilderState | None = None,
        sentences: bool = False,
    ) -> None:
        """Open the partial files.

        Args:
            prefix: Path without `.bin` and `.idx`.
            dtype: Of the stored ids (see `best_dtype`).
            impl: Layout; `cached` and `lazy` are one.
            resume: A `state()` of an interrupted builder of the same prefix and dtype; later data are dropped.
            sentences: Whether documents consist of several sequences.

        Raises:
            DataError: If the partial files hold less than `resume`, or the dtype cannot be stored.
        """
        self.prefix = str(prefix)
        self.dtype = np.dtype(dtype)
        dtype_code(self.dtype)
        self.layout: Layout = "mmap" if impl == "mmap" else "cached"
        self.sentences = sentences
        names = ("bin", "sizes", "idx", "counts")
        self._bin, self._sizes, self._idx, self._counts = (Path(f"{prefix}.{end}.partial") for end in names)
        self._state = BuilderState(**resume) if resume else BuilderState(documents=0, tokens=0, max_id=-1, crc32=0)
        if sentences:
            self._state.setdefault("sequences", 0)
        self._bin.parent.mkdir(parents=True, exist_ok=True)
        self._ids_file = open_at(self._bin, self._state["tokens"] * self.dtype.itemsize)
        self._sizes_file = open_at(self._sizes, self.num_sequences * 4)
        self._counts_file = open_at(self._counts, self._state["documents"] * 4) if sentences else None

    @property
    def num_documents(self) -> int:
        """Number of documents added."""
        return self._state["documents"]

    @property
    def num_sequences(self) -> int:
        """Number of sequences added: documents, or their sentences."""
        return self._state.get("sequences", self._state["documents"])

    @property
    def num_tokens(self) -> int:
        """Number of tokens added."""
        return self._state["tokens"]

    @property
    def progress(self) -> BuilderState:
        """Amount of data added, not necessarily on disk; valid as `resume` once a later `state()` has returned."""
        return BuilderState(**self._state)

    @property
    def totals(self) -> Totals:
        """Amount of data added, for a sidecar."""
        state = self._state
        return Totals(
            documents=state["documents"], tokens=state["tokens"], max_id=state["max_id"], crc32=state["crc32"]
        )

    def add_document(self, ids: np.ndarray | Sequence[int]) -> None:
        """Append one document, which may be empty."""
        ids = np.asarray(ids) if len(ids) else np.empty(0, self.dtype)
        self.add_documents(ids, [len(ids)], [1])

    def add_documents(
        self,
        flat_ids: np.ndarray,
        lengths: Sequence[int] | np.ndarray,
        counts: Sequence[int] | np.ndarray | None = None,
    ) -> None:
        """Append many documents.

        Args:
            flat_ids: Ids of all documents in order, any integer dtype [sum of the lengths].
            lengths: Tokens of each document [documents], or of each sentence [sum of the counts].
            counts: Sentences of each document [documents], for a builder of sentences.

        Raises:
            DataError: If the dtype cannot hold an id, the lengths do not add up, or the disk is full.
        """
        flat = np.asarray(flat_ids)
        sizes = np.asarray(lengths, dtype=np.int64)
        if flat.ndim != 1 or flat.dtype.kind not in "iu":
            raise DataError(f"{self.prefix}: token ids must be a flat integer array, not {flat.dtype} {flat.shape}")
        if sizes.sum() != len(flat) or sizes.min(initial=0) < 0 or sizes.max(initial=0) > np.iinfo(np.int32).max:
            raise DataError(
                f"{self.prefix}: lengths add up to {sizes.sum()} for {len(flat)} ids; each must be from 0 to 2^31 - 1"
            )
        if len(flat):
            self._check_range(flat)
            stored = np.ascontiguousarray(flat, dtype=self.dtype)
            _write_all(self._ids_file, stored)
            self._state["crc32"] = zlib.crc32(stored.data, self._state["crc32"])
        _write_all(self._sizes_file, sizes.astype("<i4"))
        self._state["documents"] += len(sizes) if self._counts_file is None else self._add_counts(len(sizes), counts)
        self._state["tokens"] += len(flat)

    def _add_counts(self, sentences: int, counts: Sequence[int] | np.ndarray | None) -> int:
        """Append the number of sentences of each document; return the number of documents."""
        assert self._counts_file is not None
        assert counts is not None
        each = np.asarray(counts).astype("<i4")
        if each.sum(dtype=np.int64) != sentences or each.min(initial=0) < 0:
            raise DataError(f"{self.prefix}: documents have {each.sum()} sentences, but {sentences} were given")
        _write_all(self._counts_file, each)
        self._state["sequences"] += sentences
        return len(each)

    def merge(self, prefix: str | Path) -> None:
        """Append every document of another dataset. Raises DataError for sentences if this is no builder of them."""
        other = IndexedDataset(prefix)
        if not self.sentences:
            if other.has_sentences:
                raise DataError(f"{prefix} has documents of several sequences, and this dataset has not")
            for _, sizes, tokens in other.pieces():
                self.add_documents(tokens, sizes)
            return
        for first in range(0, other.num_documents, _DOCUMENTS):
            starts = np.asarray(other.document_index[first : first + _DOCUMENTS + 1])
            sizes = other.sizes[int(starts[0]) : int(starts[-1])]
            begin = int(other.starts(starts[:1])[0]) if len(sizes) else 0
            tokens = other.tokens[begin : begin + int(sizes.sum(dtype=np.int64))]
            self.add_documents(tokens, sizes, np.diff(starts))

    def state(self) -> BuilderState:
        """Wait until all added data are on disk; return their amount, which can be given as `resume`."""
        with os_errors(DataError, f"{self.prefix} cannot be written"):
            for file in self._files():
                fsync_file(file)
        return self.progress

    def finalize(self) -> None:
        """Write the index and rename both files; the `.idx` comes last and marks the dataset as complete."""
        self.state()
        self._close()
        sizes = _mapped(self._sizes, self.num_sequences)
        counts = _mapped(self._counts, self.num_documents) if self.sentences else None
        with os_errors(DataError, f"{self.prefix} cannot be written"):
            with open(self._idx, "wb") as file:
                for part in index_parts(self.layout, self.dtype, sizes, counts):
                    file.write(part)
                fsync_file(file)
            for old in (idx_path(self.prefix), json_path(self.prefix)):  # they must never describe the new data
                old.unlink(missing_ok=True)
            replace_file(self._bin, bin_path(self.prefix))
            replace_file(self._idx, idx_path(self.prefix))
            self._sizes.unlink()
            self._counts.unlink(missing_ok=True)

    def discard(self) -> None:
        """Close and remove the partial files."""
        self._close()
        for path in (self._bin, self._sizes, self._idx, self._counts):
            path.unlink(missing_ok=True)

    def __enter__(self) -> IndexedDatasetBuilder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is None:
            self.finalize()
        else:
            with suppress(OSError):
                self._close()

    def _files(self) -> list[BinaryIO]:
        return [self._ids_file, self._sizes_file, *([] if self._counts_file is None else [self._counts_file])]

    def _close(self) -> None:
        for file in self._files():
            file.close()

    def _check_range(self, flat: np.ndarray) -> None:
        low, high = int(flat.min()), int(flat.max())
        limit = np.iinfo(self.dtype)
        if low < max(IGNORED, limit.min) or high > limit.max:
            raise DataError(f"{self.prefix}: token id {low if low < 0 else high} does not fit {self.dtype}")
        self._state["max_id"] = max(self._state["max_id"], high)


def _mapped(path: Path, count: int) -> np.ndarray:
    """Map a file of int32 numbers; an empty file cannot be mapped."""
    return np.memmap(path, dtype="<i4", mode="r") if count else np.empty(0, "<i4")


def _write_all(file: BinaryIO, array: np.ndarray) -> None:
    with os_errors(DataError, f"{file.name} cannot be written"):
        file.write(array.data)


def merge_datasets(prefixes: Sequence[str | Path], output: str | Path) -> None:
    """Concatenate datasets; the result has the bytes of one preprocessing run over all inputs.

    Args:
        prefixes: Datasets of one layout, dtype and tokenizer, in order.
        output: Prefix of the result, which has a sidecar if every input has one.

    Raises:
        DataError: If there is no input, the output is an input, or layouts, dtypes or tokenizers differ.
    """
    parts = [IndexedDataset(prefix) for prefix in prefixes]
    if not parts:
        raise DataError("nothing to merge: give at least one prefix")
    if str(output) in {part.prefix for part in parts}:
        raise DataError(f"{output} is both an input and the output of the merge; write to another prefix")
    if len({(part.layout, part.dtype) for part in parts}) > 1:
        listed = "; ".join(f"{part.prefix}: {part.layout} {part.dtype}" for part in parts)
        raise DataError(f"datasets of different kinds cannot be merged ({listed}); preprocess them alike")
    sidecars = [read_sidecar(prefix) for prefix in prefixes]
    known = [sidecar for sidecar in sidecars if sidecar is not None]
    joined = joined_sidecar(known) if known else None  # checks the tokenizers before anything is written
    sentences = any(part.has_sentences for part in parts)
    with IndexedDatasetBuilder(output, parts[0].dtype, impl=parts[0].layout, sentences=sentences) as builder:
        for prefix in prefixes:
            builder.merge(prefix)
    if joined is not None and len(known) == len(sidecars):
        write_sidecar(output, replace(joined, crc32=builder.progress["crc32"]))
    elif known:
        _log.warning("%s has no .json, because some inputs have none: its tokenizer cannot be checked", output)
