"""Writing a `.bin/.idx` pair: in bulk, in little memory, beside the target and renamed; resumable."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from io import BufferedRandom, BufferedWriter
from pathlib import Path
from types import TracebackType
from typing import Literal, TypedDict

import numpy as np

from neox.data.index_format import Layout, bin_path, dtype_code, idx_path, index_parts, json_path
from neox.data.indexed_dataset import IndexedDataset
from neox.errors import DataError
from neox.files import fsync_file, replace_file

_COPY_TOKENS = 1 << 24


class BuilderState(TypedDict):
    """How far a builder is, as plain JSON. max_id is -1 before the first token; crc32 is that of the ids' bytes."""

    documents: int
    tokens: int
    max_id: int
    crc32: int


class IndexedDatasetBuilder:
    """Append documents, then `finalize()`; until then only `PREFIX.*.partial` files exist.

    dtype: of the stored ids (`best_dtype(vocab_size)`). impl: `mmap`, or `cached`/`lazy`.
    resume: a `state()` of an interrupted builder of the same prefix and dtype; what was written after it is dropped.
    Document lengths are streamed to a file as well, so memory does not grow with the number of documents.
    """

    def __init__(
        self,
        prefix: str | Path,
        dtype: np.dtype | type,
        *,
        impl: Literal["mmap", "cached", "lazy"] = "mmap",
        resume: BuilderState | None = None,
    ) -> None:
        self.prefix = str(prefix)
        self.dtype = np.dtype(dtype)
        dtype_code(self.dtype)
        self.layout: Layout = "mmap" if impl == "mmap" else "cached"
        self._bin, self._sizes, self._idx = (Path(f"{prefix}.{end}.partial") for end in ("bin", "sizes", "idx"))
        self._state = BuilderState(**resume) if resume else BuilderState(documents=0, tokens=0, max_id=-1, crc32=0)
        self._bin.parent.mkdir(parents=True, exist_ok=True)
        self._ids_file = _open_at(self._bin, self._state["tokens"] * self.dtype.itemsize)
        self._sizes_file = _open_at(self._sizes, self._state["documents"] * 4)

    @property
    def num_documents(self) -> int:
        """Documents added so far."""
        return self._state["documents"]

    @property
    def num_tokens(self) -> int:
        """Tokens added so far."""
        return self._state["tokens"]

    @property
    def max_id(self) -> int:
        """The largest id added so far, -1 before the first."""
        return self._state["max_id"]

    @property
    def crc32(self) -> int:
        """Checksum of the ids' bytes so far: in the end, of the `.bin`."""
        return self._state["crc32"]

    @property
    def progress(self) -> BuilderState:
        """What was added so far, not necessarily on disk: good as `resume` once a later `state()` has returned."""
        return BuilderState(**self._state)

    def add_document(self, ids: np.ndarray | Sequence[int]) -> None:
        """Append one document; it may be empty."""
        ids = np.asarray(ids) if len(ids) else np.empty(0, self.dtype)
        self.add_documents(ids, [len(ids)])

    def add_documents(self, flat_ids: np.ndarray, lengths: Sequence[int] | np.ndarray) -> None:
        """Append many documents: their ids one after the other (1-D, any integer dtype), and each one's length.

        Raises DataError for ids that the dtype cannot hold and for lengths that do not add up.
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
            self._state["crc32"] = zlib.crc32(stored, self._state["crc32"])
        _write_all(self._sizes_file, sizes.astype("<i4"))
        self._state["documents"] += len(sizes)
        self._state["tokens"] += len(flat)

    def merge(self, prefix: str | Path) -> None:
        """Append every document of another dataset."""
        other = IndexedDataset(prefix)
        if other.num_documents != len(other):
            raise DataError(f"{prefix} has several sequences in a document; only one-sequence documents can be merged")
        documents = ids = 0
        while documents < len(other):
            ends = np.cumsum(other.sizes[documents : documents + _COPY_TOKENS // 16], dtype=np.int64)
            take = max(1, int(np.searchsorted(ends, _COPY_TOKENS, side="right")))
            tokens = int(ends[take - 1])
            self.add_documents(other.tokens[ids : ids + tokens], other.sizes[documents : documents + take])
            documents, ids = documents + take, ids + tokens

    def state(self) -> BuilderState:
        """Put everything added so far safely on disk and say how much that is (give it back as `resume`)."""
        with _placed(self.prefix):
            for file in (self._ids_file, self._sizes_file):
                fsync_file(file)
        return self.progress

    def finalize(self) -> None:
        """Write the index and rename both files into place; the `.idx` comes last, and marks the pair as whole."""
        self.state()
        self._close()
        sizes = np.memmap(self._sizes, dtype="<i4", mode="r") if self._state["documents"] else np.empty(0, "<i4")
        with _placed(self.prefix):
            with open(self._idx, "wb") as file:
                for part in index_parts(self.layout, self.dtype, sizes):
                    file.write(part)
                fsync_file(file)
            for old in (idx_path(self.prefix), json_path(self.prefix)):  # so that they never describe the new data
                old.unlink(missing_ok=True)
            replace_file(self._bin, bin_path(self.prefix))
            replace_file(self._idx, idx_path(self.prefix))
            self._sizes.unlink()

    def discard(self) -> None:
        """Give up: close and remove the partial files."""
        self._close()
        for path in (self._bin, self._sizes, self._idx):
            path.unlink(missing_ok=True)

    def __enter__(self) -> IndexedDatasetBuilder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Finalize after success; after an error leave the partial files, so that a later run can continue."""
        if kind is None:
            self.finalize()
        else:
            with suppress(OSError):
                self._close()

    def _close(self) -> None:
        self._ids_file.close()
        self._sizes_file.close()

    def _check_range(self, flat: np.ndarray) -> None:
        low, high = int(flat.min()), int(flat.max())
        limit = np.iinfo(self.dtype)
        if low < 0 or high > limit.max:
            raise DataError(f"{self.prefix}: token id {low if low < 0 else high} does not fit {self.dtype}")
        self._state["max_id"] = max(self._state["max_id"], high)


def _open_at(path: Path, size: int) -> BufferedWriter | BufferedRandom:
    """Open for appending after the first `size` bytes; what follows them is dropped, having fewer is an error."""
    have = path.stat().st_size if path.exists() else 0
    if have < size:
        raise DataError(f"{path} has {have} bytes, fewer than the {size} of the run to be continued; start it over")
    file = open(path, "r+b" if have else "wb", buffering=1 << 20)  # noqa: SIM115
    file.truncate(size)
    file.seek(size)
    return file


def _write_all(file: BufferedWriter | BufferedRandom, array: np.ndarray) -> None:
    with _placed(file.name):
        file.write(array.data)


@contextmanager
def _placed(path: str) -> Iterator[None]:
    """Say which file could not be written."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror or error}") from error
