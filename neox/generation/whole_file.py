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
