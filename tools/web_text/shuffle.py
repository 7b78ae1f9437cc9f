"""Step `shuffle`: a random order of documents, by sorted runs on disk.

Each document draws a number; the documents are sorted by it. So the order depends only on the seed and the inputs.
"""

from __future__ import annotations

import heapq
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np
from pydantic import Field

from tools.web_text.lines import encode_line, read_records, write_lines
from tools.web_text.step import Job, Settings, Step

_HEADER = struct.Struct("<QQI")
_DRAWS = 4096
_ENTRY_BYTES = 128  # memory of the objects of one entry
_MIB = 1 << 20
_Keyed = tuple[int, int, bytes]


class ShuffleSettings(Settings):
    """Put the documents into a random order, given by the seed."""

    memory_mb: int = Field(1024, ge=1)
    """Memory for documents; more documents go to sorted files next to the output. The order does not depend on it."""

    RUNTIME: ClassVar[frozenset[str]] = Settings.RUNTIME | {"memory_mb"}


def shuffle(job: Job[ShuffleSettings]) -> None:
    """Write the documents of a job in random order."""
    runs: list[Path] = []
    in_memory: list[_Keyed] = []
    memory = 0
    draws = _draws(job.settings.seed)
    for number, record in enumerate(read_records(job)):
        line = encode_line(record)
        in_memory.append((next(draws), number, line))
        memory += len(line) + _ENTRY_BYTES
        if memory >= job.settings.memory_mb * _MIB:
            runs.append(_write_run(job.work / f"run{len(runs):05}", in_memory))
            in_memory = []
            memory = 0
    in_memory.sort()
    merged = heapq.merge(*map(_read_run, runs), in_memory)
    job.counts.documents_out = write_lines(job.settings.output, (line for _, _, line in merged))
    job.counts.bytes_out = job.counts.bytes_in


def _draws(seed: int) -> Iterator[int]:
    random = np.random.default_rng(seed)
    while True:
        yield from random.integers(0, 1 << 63, _DRAWS, dtype=np.uint64).tolist()


def _write_run(path: Path, in_memory: list[_Keyed]) -> Path:
    in_memory.sort()
    with open(path, "wb") as file:
        for key, number, line in in_memory:
            file.write(_HEADER.pack(key, number, len(line)) + line)
    return path


def _read_run(path: Path) -> Iterable[_Keyed]:
    with open(path, "rb") as file:
        while header := file.read(_HEADER.size):
            key, number, length = _HEADER.unpack(header)
            yield key, number, file.read(length)


SHUFFLE = Step("shuffle", ShuffleSettings, shuffle)
