"""Layers that an interrupted import has written, so that the same import resumes after them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from neox.errors import CheckpointError, os_errors
from neox.files import fsync_path
from neox.log import get_logger

_log = get_logger(__name__)
_PREFIX = ".import-"
_DONE = ".done"


def fingerprint(files: Iterable[Path], settings: Mapping[str, Any]) -> str:
    """Return a digest of what an import reads and how it writes it.

    Args:
        files: Files of the model and of an adapter. Their names, sizes and times of change count.
        settings: Further settings as JSON can hold them.
    """
    read = []
    for path in sorted(files):
        status = path.stat()
        read.append([str(path), status.st_size, status.st_mtime_ns])
    described = json.dumps({"files": read, "settings": settings}, sort_keys=True)
    return sha256(described.encode()).hexdigest()[:16]


class PartialImport:
    """A directory next to the checkpoints, with the layers that are written so far.

    A layer is complete if a file with its number says so. That is written after the layer's files are on disk.

    Args:
        output: Directory of checkpoints.
        digest: What `fingerprint` returns. Directories of other imports are removed.

    Attributes:
        directory: The directory.

    Raises:
        CheckpointError: If it cannot be written.
    """

    def __init__(self, output: Path, digest: str) -> None:
        self.directory = output / f"{_PREFIX}{digest}"
        with os_errors(CheckpointError, f"{output}: cannot be written"):
            output.mkdir(parents=True, exist_ok=True)
            for other in output.glob(f"{_PREFIX}*"):
                if other != self.directory:
                    shutil.rmtree(other)
            self.directory.mkdir(exist_ok=True)
        done = len(list(self.directory.glob(f"*{_DONE}")))
        if done:
            _log.info("going on with an interrupted import: %d layers are written", done)

    def has(self, layer: int) -> bool:
        """Return whether a layer is complete."""
        return self._mark(layer).exists()

    def finish(self, layer: int) -> None:
        """Mark a layer as complete, once its files are on disk. Raises CheckpointError."""
        with os_errors(CheckpointError, f"{self.directory}: cannot be written"):
            for path in self.directory.glob(f"layer_{layer:02d}-*"):
                fsync_path(path)
            self._mark(layer).touch()

    def move_to(self, staged: Path) -> None:
        """Move the files of all layers into another directory, and remove this one. Raises CheckpointError."""
        with os_errors(CheckpointError, f"{staged}: cannot be written"):
            for path in self.directory.iterdir():
                if path.suffix != _DONE:
                    path.rename(staged / path.name)
        self.discard()

    def discard(self) -> None:
        """Remove the directory. A failure does no harm: the next import removes it."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def _mark(self, layer: int) -> Path:
        return self.directory / f"{layer}{_DONE}"
