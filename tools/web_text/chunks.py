"""Chunks of inputs, cut at positions that depend on the bytes of the inputs only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import ConfigDict

from neox.corpus import BadInput, LineBlock, Position, read_blocks
from tools.web_text.step import Record

CHUNK_BYTES = 1 << 20
RESULT_AS_JSON = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")
"""How pydantic writes the result of a chunk."""


@dataclass(frozen=True)
class Chunk:
    """Part of an input that is processed at once.

    Attributes:
        content: Lines, or records; None at the end of an input.
        bad: Bad inputs before the content.
        next: Number of the input and the position in it after the content.
    """

    content: LineBlock | tuple[Record, ...] | None
    bad: tuple[BadInput, ...]
    next: tuple[int, Position]


Reader = Callable[[tuple[str, ...], tuple[int, Position], int, Callable[[int], Any]], Iterator[Chunk]]


def read_chunks(
    files: tuple[str, ...], start: tuple[int, Position], max_line_bytes: int, consumed: Callable[[int], Any]
) -> Iterator[Chunk]:
    """Yield all inputs in chunks, each up to the first end of a line after a multiple of 1 MiB.

    Args:
        files: Paths of the inputs.
        start: Number of the input and the position in it to start from.
        max_line_bytes: Limit of a line; a longer one is a bad input.
        consumed: Called with the number of bytes newly read.

    Raises:
        DataError: If a file cannot be read.
    """
    for number in range(start[0], len(files)):
        position = start[1] if number == start[0] else Position()
        data, bad = b"", list[BadInput]()
        for block in read_blocks(
            files[number],
            block_bytes=CHUNK_BYTES,
            max_line_bytes=max_line_bytes,
            limit_flag="--max-line-mb",
            start=position,
            consumed=consumed,
        ):
            if isinstance(block, BadInput):
                if data:
                    yield (chunk := _lines(number, files[number], data, position, bad))
                    data, position, bad = b"", chunk.next[1], []
                bad.append(block)
                continue
            if not data:
                position = block.start
            data += block.data
            while size := _next_cut(data, position.offset):
                yield (chunk := _lines(number, files[number], data[:size], position, bad))
                data, position, bad = data[size:], chunk.next[1], []
        if data:
            yield _lines(number, files[number], data, position, bad)
            bad = []
        yield Chunk(None, tuple(bad), (number + 1, Position()))


def _next_cut(data: bytes, offset: int) -> int:
    """Return the length of the first chunk of `data`, which starts at `offset` of its file; 0 if it may go on."""
    return data.find(b"\n", (offset // CHUNK_BYTES + 1) * CHUNK_BYTES - offset - 1) + 1


def _lines(number: int, file: str, data: bytes, start: Position, bad: list[BadInput]) -> Chunk:
    end = Position(start.line + data.count(b"\n"), start.offset + len(data))
    return Chunk(LineBlock(file, data, start, end), tuple(bad), (number, end))
