"""Blocks of whole lines with their locations, so that other processes can parse them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from neox.corpus.document import BadInput, CorruptInput
from neox.corpus.streams import read_bytes

DEFAULT_MAX_LINE_BYTES = 1 << 28
_FIRST_BYTES = 1 << 16


@dataclass(frozen=True)
class Position:
    """Start of a line: its number from 1, and its byte after decompression."""

    line: int = 1
    offset: int = 0


@dataclass(frozen=True)
class LineBlock:
    """Block of whole lines.

    Attributes:
        file: Path of the input.
        data: The lines; a newline ends each, except perhaps the last of the file.
        start: Start of the first line.
        end: Start of the line after the last.
    """

    file: str
    data: bytes
    start: Position
    end: Position


def read_blocks(
    file: str,
    *,
    block_bytes: int,
    max_line_bytes: int = DEFAULT_MAX_LINE_BYTES,
    limit_flag: str = "--memory-mb",
    start: Position | None = None,
    consumed: Callable[[int], None] | None = None,
) -> Iterator[LineBlock | BadInput]:
    """Yield the lines of an input in blocks, and a BadInput for each defect of the stream.

    The first blocks are smaller, each up to twice the one before, so that work on the first lines starts at once. A
    line over `max_line_bytes` is skipped and yielded as a BadInput; so is the damaged or truncated rest of a file, and
    an empty file. Memory holds at most `block_bytes`, or one line, and a chunk.

    Args:
        file: Path of the input.
        block_bytes: Approximate size of a block.
        max_line_bytes: Limit of a line.
        limit_flag: Flag that raises it, for messages.
        start: Line to start from (default: the first).
        consumed: Called with the number of bytes newly read from the file itself.

    Raises:
        DataError: If the file cannot be opened or read.
    """
    cutter = _Cutter(file, start or Position(), max_line_bytes, limit_flag)
    enough = 1  # any lines of the first piece
    try:
        for chunk in _small_first(read_bytes(file, skip=cutter.start.offset, consumed=consumed)):
            yield from cutter.add(chunk)
            if cutter.held_to_newline >= enough:
                yield from cutter.cut()
                enough = min(block_bytes, max(_FIRST_BYTES, 2 * enough))
    except CorruptInput as error:
        yield from cutter.cut()
        yield cutter.bad(str(error))
        return
    yield from cutter.cut()
    yield from cutter.rest()
    if cutter.start == Position():
        yield BadInput(file, None, None, "the file is empty")


def _small_first(chunks: Iterator[bytes]) -> Iterator[bytes]:
    first = next(chunks, b"")
    yield first[:_FIRST_BYTES]
    yield first[_FIRST_BYTES:]
    yield from chunks


def first_lines(file: str, size: int) -> LineBlock | None:
    """Return the whole lines among the first `size` bytes; None if there are none, or the stream is damaged."""
    try:
        head = next(read_bytes(file), b"")[:size]
    except CorruptInput:
        return None
    data = head[: head.rfind(b"\n") + 1]
    return LineBlock(file, data, Position(), Position(1 + data.count(b"\n"), len(data))) if data else None


class _Cutter:
    """Collects chunks and cuts them after the last newline."""

    def __init__(self, file: str, start: Position, max_line_bytes: int, limit_flag: str) -> None:
        self.file, self.start, self.max_line_bytes, self.limit_flag = file, start, max_line_bytes, limit_flag
        self._whole: list[bytes] = []  # whole lines
        self._begun: list[bytes] = []  # start of an incomplete line
        self._begun_bytes = 0
        self._skipping = 0  # bytes of a line that is too long
        self.held_to_newline = 0

    def add(self, chunk: bytes) -> Iterator[LineBlock | BadInput]:
        """Add a chunk; a line that is too long is yielded, after the lines before it."""
        first = chunk.find(b"\n")
        length = self._skipping + self._begun_bytes + (len(chunk) if first < 0 else first)
        if self._skipping or length > self.max_line_bytes:
            yield from self.cut()
            if first < 0:
                self._skipping, self._begun, self._begun_bytes = length, [], 0
                return
            yield self._too_long(length)
            self._skipping, self._begun, self._begun_bytes = 0, [], 0
            self._advance(1, length + 1)
            chunk = chunk[first + 1 :]
        last = chunk.rfind(b"\n") + 1
        if last:
            self._whole += [*self._begun, chunk[:last]]
            self.held_to_newline += self._begun_bytes + last
            self._begun, self._begun_bytes = [], 0
        if last < len(chunk):
            self._begun.append(chunk[last:])
            self._begun_bytes += len(chunk) - last

    def cut(self) -> Iterator[LineBlock]:
        """Yield the whole lines collected."""
        if self._whole:
            data = b"".join(self._whole)
            self._whole, self.held_to_newline = [], 0
            start = self.start
            self._advance(data.count(b"\n"), len(data))
            yield LineBlock(self.file, data, start, self.start)

    def rest(self) -> Iterator[LineBlock | BadInput]:
        """Yield the last line, if it has no newline."""
        if self._skipping:
            length = self._skipping
            yield self._too_long(length)
            self._advance(1, length)
        elif self._begun:
            data = b"".join(self._begun)
            self._begun, self._begun_bytes = [], 0
            start = self.start
            self._advance(1, len(data))
            yield LineBlock(self.file, data, start, self.start)

    def bad(self, reason: str) -> BadInput:
        return BadInput(self.file, self.start.line, self.start.offset, reason)

    def _too_long(self, length: int) -> BadInput:
        allowed = f"more than the {self.max_line_bytes:,} that memory allows ({self.limit_flag})"
        return self.bad(f"the line has {length:,} bytes, {allowed}")

    def _advance(self, lines: int, size: int) -> None:
        self.start = Position(self.start.line + lines, self.start.offset + size)
