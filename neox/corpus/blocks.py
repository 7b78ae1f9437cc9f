"""Blocks of whole lines or rows with their positions, so that other processes can parse them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from neox.corpus.document import BadInput, CorruptInput, TextRows
from neox.corpus.fields import Filter
from neox.corpus.streams import read_chunks
from neox.corpus.tables import NULL_FILLING, Chunk
from neox.storage import name_of

DEFAULT_MAX_LINE_BYTES = 1 << 28
_FIRST_BLOCK_BYTES = 1 << 16


@dataclass(frozen=True)
class Position:
    """Start of a line.

    Attributes:
        line: Number of the line, from 1.
        offset: Number of bytes before the line, after decompression.
    """

    line: int = 1
    offset: int = 0


@dataclass(frozen=True)
class LineBlock:
    """Block of whole lines.

    Attributes:
        file: Path of the input.
        data: The lines. A newline ends each of them, except perhaps the last line of the file. For a table with one
            wanted column, the texts in it, one after another.
        start: Start of the first line.
        end: Start of the line after the last one.
        filters: Conditions that a line must meet to be a document.
        column: Name of the column of texts; None if the data are JSON lines.
        lengths: Number of bytes of each text of the column; -1 for null.
    """

    file: str
    data: bytes
    start: Position
    end: Position
    filters: tuple[Filter, ...] = ()
    column: str | None = None
    lengths: tuple[int, ...] = ()

    @property
    def fills_nulls(self) -> bool:
        """Whether objects have all keys of their column, with nulls where a row has none, as in Parquet and Arrow."""
        return name_of(self.file).endswith(NULL_FILLING)


def read_blocks(
    file: str,
    *,
    block_bytes: int,
    max_line_bytes: int = DEFAULT_MAX_LINE_BYTES,
    limit_flag: str = "--memory-mb",
    start: Position | None = None,
    consumed: Callable[[int], None] | None = None,
    filters: tuple[Filter, ...] = (),
    columns: Sequence[str] | None = None,
) -> Iterator[LineBlock | BadInput]:
    """Yield the lines of an input in blocks, and a BadInput for each defect of the stream.

    Defects are a line longer than `max_line_bytes` (it is skipped), the damaged or truncated rest of a file, and an
    empty file. The first blocks are small and the following ones grow, so that work on the first lines starts at once.
    Memory holds at most `block_bytes`, or one line, and a chunk.

    Args:
        file: Path of the input.
        block_bytes: Approximate size of a block.
        max_line_bytes: Largest size of a line.
        limit_flag: Flag that raises this limit, named in messages.
        start: Line to start from (default: the first one).
        consumed: Function that is called with the number of bytes newly read from the file itself.
        filters: Conditions that blocks carry to where their lines are parsed.
        columns: Columns of tables to read (see `neox.corpus.tables`); None for all of them. The blocks of a table whose
            only wanted column holds texts have them as they are, without JSON.

    Raises:
        DataError: If the file cannot be opened or read.
    """
    cutter = _BlockCutter(file, start or Position(), max_line_bytes, limit_flag, filters)
    wanted_bytes = 1  # the first block is what the first chunk holds
    try:
        for chunk in _small_first(
            read_chunks(
                file,
                skip=cutter.start.offset,
                skip_lines=cutter.start.line - 1,
                columns=columns,
                consumed=consumed,
            )
        ):
            yield from cutter.add(chunk)
            if cutter.complete_bytes >= wanted_bytes:
                yield from cutter.cut()
                wanted_bytes = min(block_bytes, max(_FIRST_BLOCK_BYTES, 2 * wanted_bytes))
    except CorruptInput as error:
        yield from cutter.cut()
        yield cutter.bad_input(str(error))
        return
    yield from cutter.cut()
    yield from cutter.cut_last_line()
    if cutter.start == Position():
        yield BadInput(file, None, None, "the file is empty")


def _small_first(chunks: Iterator[Chunk]) -> Iterator[Chunk]:
    """Yield chunks; the first one is divided, so that the first block is small."""
    first = next(chunks, b"")
    if isinstance(first, TextRows):
        yield from first.split(_rows_within(first, _FIRST_BLOCK_BYTES))
    else:
        yield first[:_FIRST_BLOCK_BYTES]
        yield first[_FIRST_BLOCK_BYTES:]
    yield from chunks


def _rows_within(rows: TextRows, size: int) -> int:
    """Return the number of first rows that have at most `size` bytes; at least one row."""
    for number, length in enumerate(rows.lengths):
        size -= length + 1
        if size < 0:
            return max(1, number)
    return len(rows.lengths)


def first_lines(
    file: str, size: int, *, filters: tuple[Filter, ...] = (), columns: Sequence[str] | None = None
) -> LineBlock | None:
    """Return the whole lines among the first `size` bytes. Arguments as in `read_blocks`.

    Returns:
        The lines; None if there is no whole line, or the stream is damaged.
    """
    try:
        head = next(read_chunks(file, columns=columns), b"")
    except CorruptInput:
        return None
    if isinstance(head, TextRows):
        rows, _ = head.split(_rows_within(head, size))
        end = Position(1 + len(rows.lengths), rows.size)
        return LineBlock(file, bytes(rows.data), Position(), end, filters, rows.column, tuple(rows.lengths))
    head = head[:size]
    data = head[: head.rfind(b"\n") + 1]
    if not data:
        return None
    return LineBlock(file, data, Position(), Position(1 + data.count(b"\n"), len(data)), filters)


class _BlockCutter:
    """Collector of chunks that cuts them after the last newline.

    ```
    |----- complete lines -----|-- begun line --|
    start                                       next chunk
    ```

    Attributes:
        start: Start of the first collected line.
        complete_bytes: Size of the complete lines.
    """

    def __init__(
        self, file: str, start: Position, max_line_bytes: int, limit_flag: str, filters: tuple[Filter, ...]
    ) -> None:
        self.file = file
        self.filters = filters
        self.start = start
        self.max_line_bytes = max_line_bytes
        self.limit_flag = limit_flag
        self.complete_bytes = 0
        self._complete: list[bytes | memoryview] = []
        self._column: str | None = None
        self._lengths: list[int] = []  # of the collected rows, if chunks are rows and not lines
        self._begun: list[bytes] = []
        self._begun_bytes = 0
        self._skipped_bytes = 0  # size, so far, of a line that is too long and is not kept

    def add(self, chunk: Chunk) -> Iterator[LineBlock | BadInput]:
        """Add a chunk. If a line is too long, yield the lines before it, and then a BadInput."""
        if isinstance(chunk, TextRows):
            yield from self._add_rows(chunk)
        else:
            yield from self._add_lines(chunk)

    def _add_rows(self, rows: TextRows) -> Iterator[LineBlock | BadInput]:
        """Add whole rows as `add` does."""
        self._column = rows.column
        while rows.lengths:
            is_too_long = [length > self.max_line_bytes for length in rows.lengths]
            good, rows = rows.split([*is_too_long, True].index(True))
            if good.lengths:
                self._complete.append(good.data)
                self._lengths += good.lengths
                self.complete_bytes += good.size
            if rows.lengths:
                yield from self.cut()
                too_long, rows = rows.split(1)
                yield self._too_long(len(too_long.data))
                self._advance(1, too_long.size)

    def _add_lines(self, chunk: bytes) -> Iterator[LineBlock | BadInput]:
        """Add a piece of JSON lines as `add` does."""
        newline = chunk.find(b"\n")
        line_bytes = self._skipped_bytes + self._begun_bytes  # size of the begun line up to here
        if newline < 0:
            line_bytes += len(chunk)
        else:
            line_bytes += newline
        if self._skipped_bytes or line_bytes > self.max_line_bytes:
            yield from self.cut()
            self._begun = []
            self._begun_bytes = 0
            if newline < 0:
                self._skipped_bytes = line_bytes
                return
            yield self._too_long(line_bytes)
            self._skipped_bytes = 0
            self._advance(1, line_bytes + 1)
            chunk = chunk[newline + 1 :]

        # The begun line and the chunk up to its last newline are complete; the rest begins the next line.
        complete = chunk.rfind(b"\n") + 1
        if complete:
            self._complete += self._begun
            self._complete.append(chunk[:complete])
            self.complete_bytes += self._begun_bytes + complete
            self._begun = []
            self._begun_bytes = 0
        if complete < len(chunk):
            self._begun.append(chunk[complete:])
            self._begun_bytes += len(chunk) - complete

    def cut(self) -> Iterator[LineBlock]:
        """Yield the complete lines or rows as a block, if there are any. The next block starts at its end."""
        if not self._complete:
            return
        data = b"".join(self._complete)
        self._complete = []
        self.complete_bytes = 0
        start = self.start
        if self._column is None:
            self._advance(data.count(b"\n"), len(data))
            yield LineBlock(self.file, data, start, self.start, self.filters)
        else:
            lengths = tuple(self._lengths)
            self._lengths = []
            self._advance(len(lengths), len(data) + len(lengths))  # as if each row ended with a newline
            yield LineBlock(self.file, data, start, self.start, self.filters, self._column, lengths)

    def cut_last_line(self) -> Iterator[LineBlock | BadInput]:
        """Yield the last line of the file, if no newline ends it."""
        if self._skipped_bytes:
            yield self._too_long(self._skipped_bytes)
            self._advance(1, self._skipped_bytes)
        elif self._begun:
            data = b"".join(self._begun)
            self._begun = []
            self._begun_bytes = 0
            start = self.start
            self._advance(1, len(data))
            yield LineBlock(self.file, data, start, self.start, self.filters)

    def bad_input(self, reason: str) -> BadInput:
        """Return a defect at the current position."""
        return BadInput(self.file, self.start.line, self.start.offset, reason)

    def _too_long(self, size: int) -> BadInput:
        limit = f"more than the {self.max_line_bytes:,} that memory allows ({self.limit_flag})"
        return self.bad_input(f"the line has {size:,} bytes, {limit}")

    def _advance(self, lines: int, size: int) -> None:
        self.start = Position(self.start.line + lines, self.start.offset + size)
