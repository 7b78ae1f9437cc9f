"""Chunks of inputs, and results of chunks that other machines have computed.

Inputs are cut at positions that depend only on their bytes. So a step has the same chunks in every run:

    input    |-------- 1 MiB --------|-------- 1 MiB --------|---...
    lines    [....][.......][..][........][....][.....][.......][..]...
    chunks   |----------- 0 -------------|---------- 1 ---------|---...    up to the end of a line after each MiB

    one process, or several     read_chunks -> work(chunk) -> outputs, in order
    tasks of an executor        read_chunks -> work(chunk) of every N-th chunk -> OUTPUT.shards/NNNNN.results
                                then a run as above, in which `ShardResults` returns these results: the same bytes
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar, get_type_hints

from pydantic import ConfigDict, TypeAdapter

from neox.corpus import BadInput, LineBlock, Position, read_blocks
from neox.files import atomic_write
from neox.log import get_logger
from tools.web_text.step import Job, Record, S

_log = get_logger(f"neox.{__name__}")
R = TypeVar("R")
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
        # The first end of a line after the next multiple of 1 MiB, as places in the file go.
        while size := data.find(b"\n", (position.offset // CHUNK_BYTES + 1) * CHUNK_BYTES - position.offset - 1) + 1:
            chunk = _lines(number, file, data[:size], position, bad)
            yield chunk
            data = data[size:]
            position = chunk.next[1]
            bad = []
    if data:
        yield _lines(number, file, data, position, bad)
        bad = []
    yield Chunk(None, tuple(bad), (number + 1, Position()))


def _lines(number: int, file: str, data: bytes, start: Position, bad: list[BadInput]) -> Chunk:
    end = Position(start.line + data.count(b"\n"), start.offset + len(data))
    return Chunk(LineBlock(file, data, start, end), tuple(bad), (number, end))


_ChunkKey = tuple[int, int]


def _adapter(work: Callable[[Chunk], R]) -> TypeAdapter[R]:
    return TypeAdapter(get_type_hints(type(work).__call__)["return"])


def _key(chunk: Chunk) -> _ChunkKey:
    return chunk.next[0], chunk.next[1].offset


def _owner(chunk: Chunk, tasks: int) -> int:
    """Return the task of a chunk: neighbours have different ones."""
    number, offset = _key(chunk)
    return (number + offset // CHUNK_BYTES) % tasks


def _header(job: Job[Any], files: tuple[str, ...], tasks: int) -> dict[str, Any]:
    """Return everything that determines a shard's results."""
    inputs = []
    for file in files:
        status = os.stat(file)
        inputs.append([file, status.st_size, status.st_mtime_ns])
    settings = json.loads(json.dumps(job.settings.fingerprint()))
    return {"step": job.name, "settings": settings, "inputs": inputs, "tasks": tasks}


def shard_directory(output: Path) -> Path:
    """Return the directory of a step's shards."""
    return output.with_name(f"{output.name}.shards")


def write_shard(job: Job[S], work: Callable[[Chunk], Any], files: tuple[str, ...], chunks: Iterator[Chunk]) -> None:
    """Write the results of a task's chunks, unless its shard is complete.

    Args:
        job: The job, with the number of its task and the number of tasks.
        work: Function of a chunk.
        files: The inputs of the chunks.
        chunks: All chunks of the inputs.
    """
    assert job.shard is not None
    task, tasks = job.shard
    path = shard_directory(job.settings.output) / f"{task:05}.results"
    header = _header(job, files, tasks)
    adapter = _adapter(work)
    if path.exists() and _read_header(path) == header:
        return
    with atomic_write(path) as file:
        file.write(json.dumps(header).encode() + b"\n")
        for chunk in chunks:
            if chunk.content is not None and _owner(chunk, tasks) == task:
                number, offset = _key(chunk)
                file.write(f"{number} {offset} ".encode() + adapter.dump_json(work(chunk)) + b"\n")


def _read_header(path: Path) -> Any:
    with open(path, "rb") as file:
        try:
            return json.loads(file.readline())
        except ValueError:
            return None


class ShardResults(Generic[R]):
    """Function of a chunk that returns the result from a shard, or computes it if no shard has it."""

    def __init__(self, work: Callable[[Chunk], R], shards: list[Path]) -> None:
        self._work = work
        adapter = _adapter(work)
        self._shards = [self._results(path, adapter) for path in shards]
        self._next: list[tuple[_ChunkKey, Callable[[], R]] | None] = [next(shard, None) for shard in self._shards]

    @staticmethod
    def _results(path: Path, adapter: TypeAdapter[R]) -> Iterator[tuple[_ChunkKey, Callable[[], R]]]:
        with open(path, "rb") as file:
            file.readline()
            for line in file:
                number, offset, result = line.split(b" ", 2)
                yield (int(number), int(offset)), partial(adapter.validate_json, result)

    def __call__(self, chunk: Chunk) -> R:
        """Return the result of a chunk; chunks come in order."""
        task = _owner(chunk, len(self._shards))
        key = _key(chunk)
        while (entry := self._next[task]) is not None and entry[0] < key:
            self._next[task] = next(self._shards[task], None)
        if entry is None or entry[0] != key:
            return self._work(chunk)
        _, result = entry
        return result()


def with_shards(job: Job[S], work: Callable[[Chunk], R], files: tuple[str, ...]) -> tuple[Callable[[Chunk], R], int]:
    """Return the function of a chunk that uses the results of complete shards, and how many processes should run it.

    Args:
        job: The job.
        work: Function that computes the result of a chunk.
        files: The inputs of the chunks.
    """
    shards = sorted(shard_directory(job.settings.output).glob("*.results"))
    if not shards:
        return work, job.settings.workers
    header = _header(job, files, len(shards))
    if any(_read_header(path) != header for path in shards):
        _log.warning("%s: the shards are of other inputs or settings: computing again", shards[0].parent)
        return work, job.settings.workers
    return ShardResults(work, shards), 1
