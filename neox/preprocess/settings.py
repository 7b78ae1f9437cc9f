"""What is asked of a preprocessing run, and what follows from it: files, memory, and a name for the result."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from neox.errors import DataError
from neox.tokenizer import Tokenizer, build_tokenizer

_MIB = 1 << 20
_PROCESS_MIB = 160  # a process with its imports and a vocabulary of 50,000
_COPIES = 20  # bytes of memory for each byte of text on its way: raw, lines, strings, ids, ids again
_COPIES_OF_A_PIECE = 130  # the same, for a piece of text that a tokenizer has to take at once
_LARGEST_BLOCK = 4 * _MIB
_SMALLEST_BLOCK = 256 << 10


@dataclass(frozen=True)
class TokenizerSpec:
    """The arguments of `build_tokenizer`, so that each process builds its own."""

    tokenizer_type: str
    vocab_file: str | None = None
    merge_file: str | None = None
    special_in_text: bool | None = None

    def build(self) -> Tokenizer:
        """Build the tokenizer; raises what `build_tokenizer` raises."""
        return build_tokenizer(
            self.tokenizer_type, self.vocab_file, self.merge_file, special_in_text=self.special_in_text
        )


@dataclass(frozen=True)
class PreprocessSettings:
    """One run from inputs to `OUTPUT_PREFIX_KEY_document.{bin,idx,json}`.

    inputs: files or directories, in order. keys: JSON keys, each a dataset of its own.
    workers: processes; 0 means all cores. memory_mb: for all of them together; 0 means 3 GiB and 256 MiB a worker.
    skip_bad: bad inputs that may be passed over. accelerator: `auto`, `off` or its name.
    restart: forget an interrupted run, and make finished data again.
    num_documents: how many there are, where known, for the progress display.
    """

    inputs: tuple[str, ...]
    output_prefix: str
    tokenizer: TokenizerSpec
    keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    ftfy: bool = False
    impl: Literal["mmap", "cached", "lazy"] = "mmap"
    workers: int = 0
    memory_mb: int = 0
    skip_bad: int = 0
    accelerator: str = "auto"
    restart: bool = False
    num_documents: int | None = None
    log_interval: int | None = None

    def prefix(self, key: str) -> str:
        """The dataset of one key."""
        return f"{self.output_prefix}_{key}_document"


@dataclass(frozen=True)
class MemoryShares:
    """workers: processes. block_bytes: text handed to a worker at once. in_flight_bytes: text that may be anywhere
    between reading and writing; a longer line is refused. piece_bytes: text that a tokenizer has to take at once, for
    want of a place to cut it; a longer piece is refused."""

    workers: int
    block_bytes: int
    in_flight_bytes: int
    piece_bytes: int


def share_memory(workers: int, memory_mb: int) -> MemoryShares:
    """Divide the memory; DataError if it cannot hold that many workers."""
    workers = workers or len(os.sched_getaffinity(0))
    if workers < 0 or memory_mb < 0:
        raise DataError(f"workers ({workers}) and memory ({memory_mb} MiB) cannot be negative")
    total = memory_mb or 3072 + 256 * workers
    in_flight = (total - _PROCESS_MIB * (workers + 1)) * _MIB // _COPIES
    if in_flight < _SMALLEST_BLOCK * (workers + 1):
        need = _PROCESS_MIB * (workers + 1) + _SMALLEST_BLOCK * (workers + 1) * _COPIES // _MIB + 1
        raise DataError(
            f"{total} MiB are too little for {workers} workers: give --memory-mb {need}, or fewer --workers"
        )
    block = min(_LARGEST_BLOCK, in_flight // (2 * workers + 2))
    piece = in_flight * _COPIES // _COPIES_OF_A_PIECE // workers
    return MemoryShares(workers, max(_SMALLEST_BLOCK, block), in_flight, piece)


def describe_run(settings: PreprocessSettings, files: tuple[str, ...], tokenizer_hash: str) -> Mapping[str, Any]:
    """Everything that decides the bytes of the result, as plain JSON; inputs by path, size and time of change."""
    return {
        "inputs": [[file, Path(file).stat().st_size, Path(file).stat().st_mtime_ns] for file in files],
        "keys": list(settings.keys),
        "tokenizer": tokenizer_hash,
        "special_in_text": settings.tokenizer.special_in_text,
        "append_eod": settings.append_eod,
        "ftfy": settings.ftfy,
        "impl": settings.impl,
    }


def fingerprint(description: Mapping[str, Any]) -> str:
    """A short name for a description: equal runs have equal ones."""
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()
