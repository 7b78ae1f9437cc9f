"""Resumable writing of token datasets, and merging."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice, repeat
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Literal, NotRequired, TypedDict

import numpy as np

from neox.data.token_files.columns import COLUMNS_STATE, column_lines, columns_path, joined_columns, without_columns
from neox.data.token_files.indexed_dataset import (
    IGNORED,
    IndexedDataset,
    IndexLayout,
    bin_path,
    dtype_code,
    idx_path,
    index_parts,
    json_path,
)
from neox.data.token_files.sidecar import joined_sidecar, read_sidecar, write_sidecar
from neox.errors import DataError, os_errors
from neox.files import fsync_file, replace_file
from neox.log import get_logger
from neox.resume import open_truncated

_log = get_logger(__name__)
_MERGED_DOCUMENTS = 1 << 16  # documents of several sequences that are merged at once


class DatasetTotals(TypedDict):
    """Amount of data in a dataset.

    Attributes:
        documents: Number of documents.
        tokens: Number of tokens.
        max_id: Largest id; -1 if there is none.
        crc32: Checksum of the bytes of all ids. At the end it is the checksum of the `.bin` file.
    """

    documents: int
    tokens: int
    max_id: int
    crc32: int


class BuilderState(DatasetTotals):
    """Amount of data written. It is stored as JSON in the saved state of a run.

    Attributes:
        sequences: Number of sequences; absent if each document is one sequence.
        columns_bytes: Size of the metadata kept beside the documents; absent without metadata.
        columns_crc32: Their checksum.
    """

    sequences: NotRequired[int]
    columns_bytes: NotRequired[int]
    columns_crc32: NotRequired[int]


class IndexedDatasetBuilder:
    """Writer of a token dataset.

    Documents are appended, and `finalize` completes the dataset. Until then all data are in `PREFIX.*.partial` files.
    The lengths of documents are written to a file too, so memory does not grow with their number. Used as a context
    manager, the builder finalizes at the end. After an exception it keeps the partial files, so that a later run can
    resume.
    """

    def __init__(
        self,
        prefix: str | Path,
        dtype: np.dtype | type,
        *,
        impl: Literal["mmap", "cached", "lazy"] = "mmap",
        resume: BuilderState | None = None,
        sentences: bool = False,
        columns: bool = False,
    ) -> None:
        """Open the partial files.

        Args:
            prefix: Path without `.bin` and `.idx`.
            dtype: Dtype of the stored ids (see `best_dtype`).
            impl: Layout of the index. `cached` and `lazy` are two names of one layout.
            resume: A `state()` of an interrupted builder with the same prefix and dtype. Data added after it are
                dropped.
            sentences: Whether documents consist of several sequences.
            columns: Whether a JSON object of metadata is kept for each document, in `PREFIX.columns.jsonl`.

        Raises:
            DataError: If the partial files hold less than `resume`, or the dtype cannot be stored.
        """
        self.prefix = str(prefix)
        self.dtype = np.dtype(dtype)
        dtype_code(self.dtype)  # raises DataError for a dtype that cannot be stored
        self.layout: IndexLayout = "mmap" if impl == "mmap" else "cached"
        self.sentences = sentences
        self._state = BuilderState(documents=0, tokens=0, max_id=-1, crc32=0)
        if sentences:
            self._state["sequences"] = 0
        if columns:
            self._state["columns_bytes"] = 0
            self._state["columns_crc32"] = 0
        if resume is not None:
            self._state.update(resume)
        self._bin = Path(f"{prefix}.bin.partial")
        self._idx = Path(f"{prefix}.idx.partial")
        self._sizes = Path(f"{prefix}.sizes.partial")  # tokens of each sequence
        self._counts = Path(f"{prefix}.counts.partial")  # sequences of each document
        self._bin.parent.mkdir(parents=True, exist_ok=True)
        self._ids_file = open_truncated(self._bin, self._state["tokens"] * self.dtype.itemsize)
        self._sizes_file = open_truncated(self._sizes, self.num_sequences * 4)
        self._counts_file: BinaryIO | None = None
        if sentences:
            self._counts_file = open_truncated(self._counts, self._state["documents"] * 4)
        self._columns = Path(f"{columns_path(prefix)}.partial")
        self._columns_file: BinaryIO | None = None
        if columns:
            self._columns_file = open_truncated(self._columns, self._state["columns_bytes"])

    @property
    def num_documents(self) -> int:
        """Number of documents added."""
        return self._state["documents"]

    @property
    def num_sequences(self) -> int:
        """Number of sequences added. A sequence is a document, or a sentence of one."""
        return self._state.get("sequences", self._state["documents"])

    @property
    def num_tokens(self) -> int:
        """Number of tokens added."""
        return self._state["tokens"]

    @property
    def progress(self) -> BuilderState:
        """Amount of data added. It may not be on disk yet; it can be given as `resume` after a later `state()`."""
        return BuilderState(**self._state)

    @property
    def totals(self) -> DatasetTotals:
        """Amount of data added, for the sidecar."""
        state = self._state
        return DatasetTotals(
            documents=state["documents"], tokens=state["tokens"], max_id=state["max_id"], crc32=state["crc32"]
        )

    @property
    def columns_state(self) -> dict[str, int]:
        """Size and checksum of the metadata, for the settings of the sidecar; empty without metadata."""
        return {name: value for name, value in self._state.items() if name in COLUMNS_STATE}  # type: ignore[misc]

    def add_document(self, ids: np.ndarray | Sequence[int]) -> None:
        """Append one document, which may be empty."""
        array = np.empty(0, self.dtype)
        if len(ids):
            array = np.asarray(ids)
        self.add_documents(array, [len(array)], [1])

    def add_documents(
        self,
        flat_ids: np.ndarray,
        lengths: Sequence[int] | np.ndarray,
        counts: Sequence[int] | np.ndarray | None = None,
        columns: bytes = b"",
    ) -> None:
        """Append many documents.

        Args:
            flat_ids: Ids of all documents in order, of any integer dtype [sum of the lengths].
            lengths: Number of tokens of each document [documents], or of each sentence [sum of the counts].
            counts: Number of sentences of each document [documents]. Needed by a builder of sentences only.
            columns: JSON line of metadata of each document. Needed by a builder with columns only.

        Raises:
            DataError: If the dtype cannot hold an id, the sum of the lengths is not the number of ids, or the disk is
                full.
        """
        before = self.num_documents
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
        if self._counts_file is None:
            self._state["documents"] += len(sizes)
        else:
            assert counts is not None
            self._add_counts(self._counts_file, len(sizes), np.asarray(counts).astype("<i4"))
        self._state["tokens"] += len(flat)
        if self._columns_file is not None:
            self._add_columns(self._columns_file, columns, self.num_documents - before)

    def _add_columns(self, file: BinaryIO, lines: bytes, documents: int) -> None:
        """Append metadata. Raises DataError if there is not one line for each document."""
        count = lines.count(b"\n")
        if count != documents:
            raise DataError(f"{self.prefix}: {count:,} lines of metadata for {documents:,} documents")
        with os_errors(DataError, f"{file.name} cannot be written"):
            file.write(lines)
        self._state["columns_bytes"] += len(lines)
        self._state["columns_crc32"] = zlib.crc32(lines, self._state["columns_crc32"])

    def _add_counts(self, file: BinaryIO, sentences: int, counts: np.ndarray) -> None:
        """Append the number of sentences of each document. Raises DataError if their sum is not `sentences`."""
        if counts.sum(dtype=np.int64) != sentences or counts.min(initial=0) < 0:
            raise DataError(f"{self.prefix}: documents have {counts.sum()} sentences, but {sentences} were given")
        _write_all(file, counts)
        self._state["sequences"] += sentences
        self._state["documents"] += len(counts)

    def merge(self, prefix: str | Path) -> None:
        """Append all documents of another dataset.

        Raises:
            DataError: If its documents have several sequences, and this is not a builder of sentences.
        """
        other = IndexedDataset(prefix)
        metadata: Iterator[bytes] = repeat(b"")
        if self._columns_file is not None:
            metadata = column_lines(prefix)
        if self.sentences:
            self._merge_sentences(other, metadata)
        elif other.has_sentences:
            raise DataError(f"{prefix} has documents of several sequences, and this dataset has not")
        else:
            for block in other.blocks():
                self.add_documents(block.tokens, block.sizes, None, _joined(metadata, len(block.sizes)))
        if self._columns_file is not None:
            next(metadata, None)  # there is none, and the checksum is compared

    def _merge_sentences(self, other: IndexedDataset, metadata: Iterator[bytes]) -> None:
        for first in range(0, other.num_documents, _MERGED_DOCUMENTS):
            document_starts = np.asarray(other.document_index[first : first + _MERGED_DOCUMENTS + 1])
            sizes = other.sizes[int(document_starts[0]) : int(document_starts[-1])]
            tokens = other.tokens[:0]
            if len(sizes):
                begin = int(other.starts(document_starts[:1])[0])
                tokens = other.tokens[begin : begin + int(sizes.sum(dtype=np.int64))]
            counts = np.diff(document_starts)
            self.add_documents(tokens, sizes, counts, _joined(metadata, len(counts)))

    def state(self) -> BuilderState:
        """Wait until all added data are on disk, and return their amount, which can be given as `resume`."""
        with os_errors(DataError, f"{self.prefix} cannot be written"):
            for file in self._files():
                fsync_file(file)
        return self.progress

    def finalize(self) -> None:
        """Write the index and rename both files. The `.idx` comes last, so its existence marks a complete dataset."""
        self.state()
        self._close()
        sizes = _map_int32(self._sizes, self.num_sequences)
        counts = None
        if self.sentences:
            counts = _map_int32(self._counts, self.num_documents)
        with os_errors(DataError, f"{self.prefix} cannot be written"):
            with open(self._idx, "wb") as file:
                for part in index_parts(self.layout, self.dtype, sizes, counts):
                    file.write(part)
                fsync_file(file)
            # The old index and sidecar must never describe the new data.
            idx_path(self.prefix).unlink(missing_ok=True)
            json_path(self.prefix).unlink(missing_ok=True)
            columns_path(self.prefix).unlink(missing_ok=True)
            if self._columns_file is not None:
                replace_file(self._columns, columns_path(self.prefix))
            replace_file(self._bin, bin_path(self.prefix))
            replace_file(self._idx, idx_path(self.prefix))
            self._sizes.unlink()
            self._counts.unlink(missing_ok=True)

    def discard(self) -> None:
        """Close and remove the partial files."""
        self._close()
        for path in (self._bin, self._sizes, self._idx, self._counts, self._columns):
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
        """Return the open files."""
        files = [self._ids_file, self._sizes_file, self._counts_file, self._columns_file]
        return list(filter(None, files))

    def _close(self) -> None:
        for file in self._files():
            file.close()

    def _check_range(self, flat: np.ndarray) -> None:
        """Raise DataError if the dtype cannot hold an id; note the largest id."""
        low = int(flat.min())
        high = int(flat.max())
        limit = np.iinfo(self.dtype)
        if low < max(IGNORED, limit.min):
            raise DataError(f"{self.prefix}: token id {low} does not fit {self.dtype}")
        if high > limit.max:
            raise DataError(f"{self.prefix}: token id {high} does not fit {self.dtype}")
        self._state["max_id"] = max(self._state["max_id"], high)


def _map_int32(path: Path, count: int) -> np.ndarray:
    """Map a file of `count` int32 numbers."""
    if count == 0:  # an empty file cannot be mapped
        return np.empty(0, "<i4")
    return np.memmap(path, dtype="<i4", mode="r")


def _joined(lines: Iterator[bytes], count: int) -> bytes:
    """Return the next lines in one piece."""
    return b"".join(islice(lines, count))


def _write_all(file: BinaryIO, array: np.ndarray) -> None:
    with os_errors(DataError, f"{file.name} cannot be written"):
        file.write(array.data)


def merge_datasets(prefixes: Sequence[str | Path], output: str | Path) -> None:
    """Join datasets. The result has the same bytes as one preprocessing run over all inputs.

    Args:
        prefixes: Datasets with the same layout, dtype and tokenizer, in order.
        output: Prefix of the result. It gets a sidecar if every input has one.

    Raises:
        DataError: If there is no input, the output is an input, or layouts, dtypes or tokenizers differ.
    """
    parts = [IndexedDataset(prefix) for prefix in prefixes]
    _check_mergeable(parts, output)
    sidecars = []
    for prefix in prefixes:
        sidecar = read_sidecar(prefix)
        if sidecar is not None:
            sidecars.append(sidecar)
    joined = None
    if sidecars:
        joined = joined_sidecar(sidecars)  # checks the tokenizers before anything is written
    sentences = any(part.has_sentences for part in parts)
    columns = joined_columns(prefixes)
    with IndexedDatasetBuilder(
        output, parts[0].dtype, impl=parts[0].layout, sentences=sentences, columns=bool(columns)
    ) as builder:
        for prefix in prefixes:
            builder.merge(prefix)
    if joined is None:
        return
    if len(sidecars) < len(parts):
        _log.warning("%s has no .json, because some inputs have none: its tokenizer cannot be checked", output)
        return
    settings = without_columns(joined.settings)
    if columns:
        settings.update(columns=list(columns), **builder.columns_state)
    write_sidecar(output, replace(joined, settings=settings, crc32=builder.progress["crc32"]))


def _check_mergeable(parts: Sequence[IndexedDataset], output: str | Path) -> None:
    """Raise DataError if there is no part, the output is a part, or layouts or dtypes differ."""
    if not parts:
        raise DataError("nothing to merge: give at least one prefix")
    if any(part.prefix == str(output) for part in parts):
        raise DataError(f"{output} is both an input and the output of the merge; write to another prefix")
    if len({(part.layout, part.dtype) for part in parts}) > 1:
        listed = "; ".join(f"{part.prefix}: {part.layout} {part.dtype}" for part in parts)
        raise DataError(f"datasets of different kinds cannot be merged ({listed}); preprocess them in the same way")
