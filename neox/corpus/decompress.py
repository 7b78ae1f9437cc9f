"""Parallel, verified decompression of `.zst` files."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
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
        target: The decompressed file; None if the compressed file was only verified.
        size: Number of decompressed bytes.
        fresh: Whether this run decompressed the file. If not, an earlier run did.
    """

    source: Path
    target: Path | None
    size: int
    fresh: bool = True


def compressed_files(paths: Sequence[str | Path]) -> tuple[Path, ...]:
    """Return the `.zst` files among `paths`, and those in the directories among them.

    Raises:
        DataError: If a path does not exist or is not a `.zst` file, or a directory holds none.
    """
    found: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            files = sorted(file for file in path.iterdir() if file.name.endswith(_SUFFIX) and file.is_file())
            if not files:
                raise DataError(f"{path}: the directory holds no .zst file")
            found += files
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
    """Decompress files in parallel. Each result has the name of its file without `.zst`.

    A result appears only when it is complete. One that is newer than its file is kept, so the same call continues
    after an interruption.

    Args:
        files: Files to decompress.
        output: Directory of the results; None verifies the files and writes nothing.
        workers: Number of threads; 0 means one per core.
        consumed: Function that is called with the number of bytes newly read.

    Raises:
        DataError: If a file is damaged, truncated or followed by other data, or the disk is full.
    """
    directory = None
    if output is not None:
        directory = Path(output)
    threads = workers or len(os.sched_getaffinity(0))
    stop = Event()
    with ThreadPoolExecutor(min(threads, max(len(files), 1))) as pool:
        jobs = [pool.submit(_decompress_file, file, directory, consumed, stop) for file in files]
        try:
            wait(jobs, return_when=FIRST_EXCEPTION)
        finally:
            if not all(job.done() and job.exception() is None for job in jobs):
                stop.set()
    for job in jobs:
        error = job.exception()
        if isinstance(error, DataError):
            raise error
    return tuple(job.result() for job in jobs)


class _Stopped(Exception):
    """Work on this file ends because another file failed."""


def _decompress_file(
    source: Path, directory: Path | None, consumed: Callable[[int], None] | None, stop: Event
) -> Decompressed:
    """Decompress one file, or keep an earlier result. Raises DataError as `decompress_files`."""
    target = None
    opened: AbstractContextManager[BinaryIO | None] = nullcontext()
    if directory is not None:
        target = directory / source.name.removesuffix(_SUFFIX)
        if target.exists() and target.stat().st_mtime >= source.stat().st_mtime:
            if consumed is not None:
                consumed(source.stat().st_size)
            return Decompressed(source, target, target.stat().st_size, fresh=False)
        opened = atomic_write(target)
    size = 0
    reported = 0
    try:
        with opened as out, open(source, "rb", buffering=_READ_BYTES) as file:
            for chunk in decompress_zstd(file):
                if stop.is_set():
                    raise _Stopped
                if out is not None:
                    out.write(chunk)
                size += len(chunk)
                position = file.tell()
                if consumed is not None and position != reported:
                    consumed(position - reported)
                    reported = position
    except CorruptInput as error:
        raise DataError(f"{source}: {error}; fetch it again") from error
    except OSError as error:
        raise DataError(f"{error.filename or target or source}: {error.strerror or error}") from error
    return Decompressed(source, target, size)
