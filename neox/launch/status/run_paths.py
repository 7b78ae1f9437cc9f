"""Paths that name a run: its directory, its metrics file, or its checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from neox.errors import DataError
from neox.metrics import METRICS_FILE
from neox.plan.run_identity import find_run, saved_config
from neox.run_events import EVENTS_FILE

_FILES = (EVENTS_FILE, METRICS_FILE, "plan.json")
_MOST_NAMED = 8
"""Run directories that an error names."""


def find_run_directory(path: Path) -> Path:
    """Return the run directory (`log_dir`) that a path names.

    Args:
        path: The directory, the metrics file in it, the directory above it, a checkpoint, or a directory of checkpoints
            (`save`), whose configuration names the run directory.

    Raises:
        DataError: The path names none, or several.
    """
    if path.name == METRICS_FILE:
        path = path.parent
    if _is_run_directory(path):
        return path
    below = _run_directories(path, "*/")
    if len(below) == 1:
        return below[0]
    if below:
        raise DataError(f"{path} has several run directories: {_listed(below)}; name one")
    found = find_run(path)
    config = saved_config(path if found is None else found.checkpoint)
    if config is not None and config.logging.log_dir is not None:
        directory = Path(config.logging.log_dir)
        if _is_run_directory(directory):
            return directory
        raise DataError(f"{path} is of a run whose log_dir, {directory}, is not here: name that directory")
    deeper = _run_directories(path, "*/*/")
    if deeper:
        raise DataError(f"{path} names no run; those below it are {_listed(deeper)}: name one")
    raise DataError(
        f"{path} names no run: give its log_dir, which has {', '.join(_FILES)}, the directory above it, or its "
        "checkpoints"
    )


def _run_directories(path: Path, pattern: str) -> list[Path]:
    """Return the run directories among those that match a pattern below a path."""
    return list(filter(_is_run_directory, sorted(path.glob(pattern))))


def _listed(paths: Sequence[Path]) -> str:
    """Return paths in words, at most a few of them."""
    words = ", ".join(map(str, paths[:_MOST_NAMED]))
    if len(paths) > _MOST_NAMED:
        words += f" and {len(paths) - _MOST_NAMED} more"
    return words


def _is_run_directory(path: Path) -> bool:
    return any((path / name).is_file() for name in _FILES)
