"""Files that appear whole, or stay as they were."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path


def write_whole(path: Path, parts: Iterable[str]) -> None:
    """Write a text file beside its place and rename it; makes its directory. Raises OSError, or what `parts` does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("w", encoding="utf-8") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def check_writable(path: Path) -> None:
    """Raise OSError where a file could not be written; makes its directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=path.parent).close()


def closed_directory(path: Path) -> Path | None:
    """Return what is in the way of a file and its directories as far as can be seen without making any: the nearest
    thing above it that exists, where that is no directory or may not be written in."""
    above = next(parent for parent in path.absolute().parents if parent.exists())
    return None if above.is_dir() and os.access(above, os.W_OK) else above
