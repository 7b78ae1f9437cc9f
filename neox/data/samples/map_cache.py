"""Cache of index maps on disk: one process builds them, the others wait, and all map the same files."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from neox.files import atomic_directory, lock_file
from neox.log import get_logger

_log = get_logger(__name__)

Arrays = Mapping[str, np.ndarray]


def load_or_build(
    cache_dir: str | Path | None, key: str, names: tuple[str, ...], build: Callable[[], Arrays]
) -> Arrays:
    """Return memory-mapped arrays from the cache. If they are not there, one process builds them and the others wait.

    Args:
        cache_dir: Directory of the cache. None builds the arrays in memory. If the directory cannot be written, they
            are built in memory too, with a warning.
        key: Hash of everything that determines the arrays. It is the name of their entry.
        names: Names of the arrays.
        build: Function that builds the arrays.
    """
    if cache_dir is None:
        return build()
    entry = Path(cache_dir) / key
    arrays = _load(entry, names)
    if arrays is not None:
        return arrays
    built: Arrays | None = None
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        with open(entry.with_suffix(".lock"), "a") as file:
            is_locked = lock_file(file, wait=True)  # on a file system without locks, each process builds the arrays
            arrays = _load(entry, names)  # another process may have built them while this one waited
            if arrays is not None:
                return arrays
            built = build()
            if is_locked:
                _remove_leftovers(entry)
            _save(entry, built)
    except OSError as error:
        _log.warning("index maps cannot be written to %s (%s): they stay in memory", cache_dir, error.strerror or error)
        return built or build()
    return _load(entry, names) or built


def _load(entry: Path, names: tuple[str, ...]) -> Arrays | None:
    """Return the memory-mapped arrays of an entry; None if there is no complete entry."""
    if not entry.is_dir():
        return None
    arrays = {}
    try:
        for name in names:
            mapped = np.load(entry / f"{name}.npy", mmap_mode="r", allow_pickle=False)
            arrays[name] = np.asarray(mapped)  # plain arrays are faster to index than `np.memmap`
        return arrays
    except (OSError, ValueError, EOFError) as error:
        _log.warning("index maps in %s are damaged (%s): building them again", entry, error)
        return None


def _remove_leftovers(entry: Path) -> None:
    """Remove what killed processes left of an entry. No other process may be writing the entry."""
    for suffix in ("partial", "old"):
        for leftover in entry.parent.glob(f"{entry.name}.*.{suffix}"):
            shutil.rmtree(leftover, ignore_errors=True)


def _save(entry: Path, arrays: Arrays) -> None:
    """Write an entry, or replace a damaged one. It appears only when it is complete."""
    try:
        with atomic_directory(entry) as partial:
            for name, array in arrays.items():
                np.save(partial / f"{name}.npy", array, allow_pickle=False)
    except OSError as error:
        # Another machine may have written the same arrays in the meantime.
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
