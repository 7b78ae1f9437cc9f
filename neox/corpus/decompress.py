"""Parallel, verified decompression of `.zst` files."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import BinaryIO

from neox.corpus.document import CorruptInput
from neox.corpus.streams import decompress_zstd
from neox.errors import DataError
from neox.files import atomic_write

_SUFFIX = ".zst"
_READ_BYTES = 1 << 17


@dataclass(frozen=True)
class Decompressed:
    """Result for one file.

    Attributes:
        source: The compressed file.
        target: The decompressed file; None if it was only verified.
        size: Decompressed bytes.
        fresh: False if an earlier run had decompressed it.
    """

    source: Path
    target: Path | None
    size: int
    fresh: bool = True


def compressed_files(paths: Sequence[str | Path]) -> tuple[Path, ...]:
    """Return the `.zst` files among `paths` and directly in their directories. Raises DataError if there are none."""
    found: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = sorted(p for p in path.iterdir() if p.name.endswith(_SUFFIX) and p.is_file())
            if not inside:
                raise DataError(f"{path}: the directory holds no .zst file")
            found += inside
        elif not path.is_file():
            raise DataError(f"{path} does not exist")
        elif not path.name.endswith(_SUFFIX):
            raise DataError(f"{path} is not a .zst file by its name")
        else:
            found.append(path)
    return tuple(found)


def decompress_files(
    files: Sequence[Path],
    output: str | Path | None,
    *,
    workers: int = 0,
    consumed: Callable[[int], None] | None = None,
) -> tuple[Decompressed, ...]:
    """Decompress files atomically, each under its name without `.zst`.

    A result that is newer than its source is kept, so that the same call continues after an interruption.

    Args:
        files: Files to decompress.
        output: Directory of the results; None only verifies.
        workers: Threads; 0 means one for each core.
        consumed: Called with the number of bytes read.

    Raises:
        DataError: If a file is damaged, truncated or followed by other data, or the disk is full.
    """
    stop = Event()
    threads = workers or len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(min(threads, max(len(files), 1))) as pool:
        jobs = [pool.submit(_one, file, None if output is None else Path(output), consumed, stop) for file in files]
        try:
            wait(jobs, return_when=FIRST_EXCEPTION)
        finally:
            if any(job.done() and job.exception() for job in jobs) or not all(job.done() for job in jobs):
                stop.set()
    failed = [error for job in jobs if isinstance(error := job.exception(), DataError)]
    if failed:
        raise failed[0]
    return tuple(job.result() for job in jobs)


class _Stopped(Exception):
    """Stop because another file failed."""


def _one(source: Path, output: Path | None, consumed: Callable[[int], None] | None, stop: Event) -> Decompressed:
    target = None if output is None else output / source.name.removesuffix(_SUFFIX)
    if target is not None and target.exists() and target.stat().st_mtime >= source.stat().st_mtime:
        if consumed is not None:
            consumed(source.stat().st_size)
        return Decompressed(source, target, target.stat().st_size, fresh=False)
    try:
        with open(os.devnull, "wb") if target is None else atomic_write(target) as out:
            size = _decompress(source, out, consumed, stop)
        return Decompressed(source, target, size)
    except CorruptInput as error:
        raise DataError(f"{source}: {error}; fetch it again") from error
    except OSError as error:
        raise DataError(f"{error.filename or target or source}: {error.strerror or error}") from error


def _decompress(source: Path, out: BinaryIO, consumed: Callable[[int], None] | None, stop: Event) -> int:
    size = read = 0
    with open(source, "rb", buffering=_READ_BYTES) as file:
        for chunk in decompress_zstd(file):
            if stop.is_set():
                raise _Stopped
            out.write(chunk)
            size += len(chunk)
            if consumed is not None and (at := file.tell()) != read:
                consumed(at - read)
                read = at
    return size
