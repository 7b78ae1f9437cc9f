"""Checkpoints that a run or an import leaves behind: those after the step to which a run goes back, or all of them.

They move to the directory `superseded`, so that they neither mix with the new history nor get lost.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from neox.checkpoint_files.finding import checkpoint_directories, step_of
from neox.checkpoint_files.names import LATEST, PENDING
from neox.errors import CheckpointError, os_errors
from neox.files import write_text
from neox.log import get_logger

_log = get_logger(__name__)
SUPERSEDED = "superseded"
"""Name of the directory next to the checkpoints."""


def supersede_after(save: Path, kept: Path) -> list[Path]:
    """Move the checkpoints of later steps than `kept` to `superseded`, and let `latest` name `kept`. One rank calls it.

    Returns:
        Their new paths.

    Raises:
        CheckpointError: If the disk refuses.
    """
    step = step_of(kept)
    later = [path for path in checkpoint_directories(save) if step is not None and (step_of(path) or 0) > step]
    if not later:
        return []
    with os_errors(CheckpointError, f"{save}: `latest` cannot be written"):
        write_text(save / LATEST, kept.name)
    return _move(save, later, f"this run continues from {kept.name}")


def supersede_all(save: Path, further_files: Sequence[str] = ()) -> list[Path]:
    """Move all checkpoints to `superseded`, and remove `latest`. One rank calls it.

    Args:
        save: Directory of the checkpoints.
        further_files: Names of files next to the checkpoints that are moved as well, if they exist.

    Returns:
        Their new paths.

    Raises:
        CheckpointError: If the disk refuses.
    """
    if not save.is_dir():
        return []
    with os_errors(CheckpointError, f"{save}: `latest` cannot be removed"):
        (save / LATEST).unlink(missing_ok=True)
    files = [save / name for name in further_files if (save / name).exists()]
    return _move(save, [*checkpoint_directories(save), *files], "the new ones take their place")


def _move(save: Path, paths: Sequence[Path], why: str) -> list[Path]:
    """Move checkpoints and files; one whose name is taken gets a number. `why` and what stays are logged."""
    directory = save / SUPERSEDED
    moved = []
    with os_errors(CheckpointError, f"{save}: cannot be written"):
        (save / PENDING).unlink(missing_ok=True)
        if paths:
            directory.mkdir(exist_ok=True)
    for path in paths:
        target = directory / path.name
        number = 2
        while target.exists():
            target = directory / f"{path.name}.{number}"
            number += 1
        try:
            os.rename(path, target)
        except OSError as error:  # a mount point, for example; `latest` says which one counts
            _log.warning("%s cannot be moved to %s, and stays: %s; move it by hand", path, target, error.strerror)
            continue
        _log.warning("moved %s to %s: %s", path, target, why)
        moved.append(target)
    return moved
