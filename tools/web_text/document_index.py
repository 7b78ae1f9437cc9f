"""Columns on disk that describe each document of a job: digest, length, band hashes; resumable.

Documents are numbered from 0 over all inputs. A document takes about 20 bytes, and 8 more for each band.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from neox.corpus import BadInput, LineBlock, parse_records
from neox.errors import DataError
from neox.files import fsync_file
from neox.log import progress
from neox.resume import ResumeLog, open_truncated
from neox.workers import ordered_map
from tools.web_text.chunks import RESULT_AS_JSON, START, Chunk, read_chunks
from tools.web_text.documents import ChunkState
from tools.web_text.lines import batches, total_bytes
from tools.web_text.signatures import Bands, band_hashes
from tools.web_text.step import Counts, Record

LONGEST = 1 << 23  # characters; a longer document only equals others with the same text
MAX_DOCUMENTS = 1 << 32
_BATCH = 1 << 20  # characters whose signatures are made at once
_ROWS = 1 << 20
_CHUNKS = "chunk"  # column with the number of documents of each chunk
_NARROW = ("characters", "bytes", _CHUNKS)  # columns of 4 bytes


def records_of(chunk: Chunk) -> Iterator[Record | BadInput]:
    """Yield the documents and the bad lines of a chunk."""
    if isinstance(chunk.content, LineBlock):
        yield from parse_records(chunk.content)


def good_records(chunk: Chunk) -> Iterator[Record]:
    """Yield the documents of a chunk."""
    for record in records_of(chunk):
        if not isinstance(record, BadInput):
            yield record


@dataclass(frozen=True)
class ChunkRows:
    """Rows of the columns for the documents of a chunk.

    Attributes:
        columns: Bytes of each column.
        documents: Number of rows.
        text_bytes: UTF-8 bytes of the texts.
        bad: Bad lines.
    """

    __pydantic_config__ = RESULT_AS_JSON

    columns: tuple[bytes, ...]
    documents: int
    text_bytes: int
    bad: tuple[BadInput, ...]


@dataclass(frozen=True)
class IndexChunk:
    """Function of a chunk, for worker processes: describes its documents.

    Attributes:
        bands: Division of the signatures; None leaves them out.
        seed: Seed of the signatures.
    """

    bands: Bands | None
    seed: int

    def __call__(self, chunk: Chunk) -> ChunkRows:
        """Describe the documents of a chunk."""
        bad: list[BadInput] = []
        texts: list[str] = []
        for record in records_of(chunk):
            if isinstance(record, BadInput):
                bad.append(record)
            else:
                texts.append(record["text"])
        encoded = [text.encode() for text in texts]
        digests = b"".join(hashlib.blake2b(data, digest_size=16).digest() for data in encoded)
        halves = np.frombuffer(digests, dtype="<u8").reshape(-1, 2)
        characters = np.array(list(map(len, texts)), dtype="<u4")
        sizes = np.array(list(map(len, encoded)), dtype="<u4")
        columns: list[NDArray[Any]] = [halves[:, 0], halves[:, 1], characters, sizes]
        if self.bands is not None:
            columns += list(self._hashes(texts, self.bands).T)
        rows = tuple(column.tobytes() for column in columns)
        return ChunkRows(rows, len(texts), sum(map(len, encoded)), tuple(bad))

    def _hashes(self, texts: list[str], bands: Bands) -> NDArray[np.uint64]:
        """Return the band hashes of texts [texts, bands]; those of a text that is too long mean nothing."""
        found = [np.empty((0, bands.count), dtype=np.uint64)]
        short = (text if len(text) <= LONGEST else "" for text in texts)
        for batch in batches(short, _BATCH):
            found.append(band_hashes(batch, bands, self.seed))
        return np.concatenate(found)


@dataclass
class _IndexState(ChunkState):
    """State of an index.

    Attributes:
        chunks: Chunks done.
        complete: Whether the columns hold all documents.
        file_ends: Number of documents in the first files, for each file that is done.
    """

    chunks: int = 0
    complete: bool = False
    file_ends: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class DocumentIndex:
    """Columns of all documents of some files.

    Attributes:
        directory: Where the columns are.
        files: The files, in order.
        bands: Division of the signatures; None if there are none.
        max_line_bytes: Longest line.
    """

    directory: Path
    files: tuple[str, ...]
    bands: Bands | None
    max_line_bytes: int

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the columns, without the one of the chunks."""
        count = self.bands.count if self.bands is not None else 0
        bands = [f"band_{number:03}" for number in range(count)]
        return ("digest_0", "digest_1", "characters", "bytes", *bands)

    def column(self, name: str) -> NDArray[Any]:
        """Return a column, memory-mapped [documents]."""
        kind = np.dtype(f"<u{_width(name)}")
        path = self.directory / name
        if not path.stat().st_size:  # an empty file cannot be mapped
            return np.empty(0, kind)
        return np.asarray(np.memmap(path, kind, "r"))

    def pieces(self, name: str) -> Iterator[tuple[int, NDArray[Any]]]:
        """Yield a column piece by piece, each with the number of its first document."""
        column = self.column(name)
        for start in range(0, len(column), _ROWS):
            yield start, np.array(column[start : start + _ROWS])

    def __len__(self) -> int:
        return (self.directory / "characters").stat().st_size // 4

    def documents_of(self, files: int) -> int:
        """Return the number of documents in the first files of a complete index."""
        if not files:
            return 0
        state = self._log.read()
        assert state is not None
        return state.file_ends[files - 1]

    @cached_property
    def _log(self) -> ResumeLog[_IndexState]:
        # The directory belongs to one job, so every state in it does.
        return ResumeLog(self.directory / "index.progress.json", "index", _IndexState.from_json)

    def chunks(self, consumed: Callable[[int], Any] = lambda _: None) -> Iterator[tuple[int, int, Chunk]]:
        """Read the chunks of the files again.

        Args:
            consumed: Function that is called with the number of bytes newly read.

        Yields:
            Number of a chunk's first document, number after its last, and the chunk.
        """
        ends = np.cumsum(self.column(_CHUNKS), dtype=np.int64)
        read = read_chunks(self.files, START, self.max_line_bytes, consumed)
        start = 0
        for chunk, end in zip(read, ends.tolist(), strict=True):
            yield start, end, chunk
            start = end

    def build(self, work: Callable[[Chunk], ChunkRows], workers: int, skip_bad: int) -> Counts:
        """Fill the columns, or continue where an earlier call was interrupted.

        Args:
            work: Function of a chunk.
            workers: Number of processes.
            skip_bad: Number of bad inputs that may be skipped.

        Returns:
            Counts of the documents read.

        Raises:
            DataError: If too many inputs are bad, or there are more documents than can be numbered.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        state = self._log.read() or _IndexState()
        if state.complete:
            return state.counts
        with ExitStack() as stack:
            columns: list[BinaryIO] = []  # after the rows that the state counts; the one of the chunks last
            for name in self.names:
                size = _width(name) * state.counts.documents_in
                columns.append(stack.enter_context(open_truncated(self.directory / name, size)))
            of_chunks = open_truncated(self.directory / _CHUNKS, _width(_CHUNKS) * state.chunks)
            columns.append(stack.enter_context(of_chunks))
            bar = stack.enter_context(progress("signatures", total_bytes(self.files), "B"))
            chunks = read_chunks(self.files, state.next, self.max_line_bytes, bar.update)
            results = stack.enter_context(closing(ordered_map(work, chunks, workers)))
            for chunk, rows in results:
                counts = state.counts
                for bad in (*chunk.bad, *rows.bad):
                    counts.add_bad(bad, skip_bad)
                for file, data in zip(columns, (*rows.columns, np.uint32(rows.documents).tobytes()), strict=True):
                    file.write(data)
                counts.documents_in += rows.documents
                counts.bytes_in += rows.text_bytes
                state.chunks += 1
                state.next = chunk.next
                if chunk.content is None:  # the end of a file
                    state.file_ends.append(counts.documents_in)
                if counts.documents_in >= MAX_DOCUMENTS:
                    raise DataError(f"more than {MAX_DOCUMENTS:,} documents: divide the files into several runs")
                if self._log.is_due:
                    self._write_state(state, columns)
            state.complete = True
            self._write_state(state, columns)
        return state.counts

    def _write_state(self, state: _IndexState, columns: list[BinaryIO]) -> None:
        for file in columns:
            fsync_file(file)
        self._log.write(state)


def _width(column: str) -> int:
    """Return the bytes of a value of a column."""
    return 4 if column in _NARROW else 8
