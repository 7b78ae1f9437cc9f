"""Chunks of inputs, cut at positions that depend only on the bytes of the inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import ConfigDict

from neox.corpus import BadInput, LineBlock, Position, read_blocks
from tools.web_text.step import Record

CHUNK_BYTES = 1 << 20
Place = tuple[int, Position]
"""Number of an input, and the position in it."""

START: Place = (0, Position())
RESULT_AS_JSON = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")
"""How pydantic writes the result of a chunk."""


@dataclass(frozen=True)
class Chunk:
    """Part of an input that is processed at once.

    Attributes:
        content: Lines, or records; None at the end of an input.
        bad: Bad inputs before the content.
        next: Place where the next chunk starts.
    """

    content: LineBlock | tuple[Record, ...] | None
    bad: tuple[BadInput, ...]
    next: Place


Reader = Callable[[tuple[str, ...], Place, int, Callable[[int], Any]], Iterator[Chunk]]


def read_chunks(
    files: tuple[str, ...], start: Place, max_line_bytes: int, consumed: Callable[[int], Any]
) -> Iterator[Chunk]:
    """Yield all inputs in chunks, each up to the first end of a line after a multiple of 1 MiB.

    Args:
        files: Paths of the inputs.
        start: Place to start from.
        max_line_bytes: Longest line; a longer one is a bad input.
        consumed: Function that is called with the number of bytes newly read.

    Raises:
        DataError: If a file cannot be read.
    """
    for number in range(start[0], len(files)):
        position = start[1] if number == start[0] else Position()
        blocks = read_blocks(
            files[number],
            block_bytes=CHUNK_BYTES,
            max_line_bytes=max_line_bytes,
            limit_flag="--max-line-mb",
            start=position,
            consumed=consumed,
        )
        yield from _cut(files[number], number, blocks)


def _cut(file: str, number: int, blocks: Iterable[LineBlock | BadInput]) -> Iterator[Chunk]:
    """Yield the blocks of an input in chunks, and a chunk without content at the end."""
    data = b""
    position = Position()
    bad: list[BadInput] = []
    for block in blocks:
        if isinstance(block, BadInput):
            if data:
                yield _lines(number, file, data, position, bad)
                data = b""
                bad = []
            bad.append(block)
            continue
        if not data:
            position = block.start
        data += block.data
        while size := _next_cut(data, position.offset):
            chunk = _lines(number, file, data[:size], position, bad)
            yield chunk
            data = data[size:]
            position = chunk.next[1]
            bad = []
    if data:
        yield _lines(number, file, data, position, bad)
        bad = []
    yield Chunk(None, tuple(bad), (number + 1, Position()))


def _next_cut(data: bytes, offset: int) -> int:
    """Return the length of the first chunk of `data`; 0 if the chunk does not end in it.

    Args:
        data: Lines.
        offset: Place of `data` in its file.
    """
    return data.find(b"\n", (offset // CHUNK_BYTES + 1) * CHUNK_BYTES - offset - 1) + 1


def _lines(number: int, file: str, data: bytes, start: Position, bad: list[BadInput]) -> Chunk:
    end = Position(start.line + data.count(b"\n"), start.offset + len(data))
    return Chunk(LineBlock(file, data, start, end), tuple(bad), (number, end))
