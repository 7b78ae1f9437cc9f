"""Results of a step's chunks that tasks compute, perhaps on other machines that share a file system.

A task computes the results of its share of the chunks and writes them to a shard. Then the step runs as usual, but
takes results from the shards that have its settings and inputs. So the output has the same bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar, get_type_hints

from pydantic import TypeAdapter

from neox.files import atomic_write
from neox.log import get_logger
from tools.web_text.chunks import CHUNK_BYTES, Chunk
from tools.web_text.step import Job, S

_log = get_logger(f"neox.{__name__}")
R = TypeVar("R")
_Key = tuple[int, int]


def _adapter(work: Callable[[Chunk], R]) -> TypeAdapter[R]:
    return TypeAdapter(get_type_hints(type(work).__call__)["return"])


def _key(chunk: Chunk) -> _Key:
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


class Replay(Generic[R]):
    """Function of a chunk that returns the result from a shard, or computes it if no shard has it."""

    def __init__(self, work: Callable[[Chunk], R], shards: list[Path]) -> None:
        self._work = work
        adapter = _adapter(work)
        self._shards = [self._results(path, adapter) for path in shards]
        self._next: list[tuple[_Key, Callable[[], R]] | None] = [next(shard, None) for shard in self._shards]

    @staticmethod
    def _results(path: Path, adapter: TypeAdapter[R]) -> Iterator[tuple[_Key, Callable[[], R]]]:
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
    return Replay(work, shards), 1
