"""Arrays kept on disk: named by what they follow from, built by one process of a node, then memory-mapped by all."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from neox.files import atomic_directory, lock_file
from neox.log import get_logger

_LOG = get_logger(__name__)

Arrays = Mapping[str, np.ndarray]


def load_or_build(
    cache_dir: str | Path | None, key: str, names: tuple[str, ...], build: Callable[[], Arrays]
) -> Arrays:
    """Return the arrays `names` of entry `key`; the first process to ask builds them, the others wait for it.

    key: a hash of everything the arrays depend on, so that other data or parameters never meet old arrays.
    Where `cache_dir` is None the arrays are built in memory; where it cannot be written too, with a warning.
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
            alone = lock_file(file, wait=True)  # without locks each process builds the same arrays
            arrays = _load(entry, names)  # another process may have built them while this one waited
            if arrays is not None:
                return arrays
            built = build()
            _save(entry, built, remove_leftovers=alone)
    except OSError as error:
        _LOG.warning("cannot keep index maps in %s (%s); they stay in memory", cache_dir, error.strerror or error)
        return built or build()
    return _load(entry, names) or built


def _load(entry: Path, names: tuple[str, ...]) -> Arrays | None:
    """Map a finished entry, or None; a directory is only ever renamed into place whole."""
    if not entry.is_dir():
        return None
    try:
        maps = {name: np.load(entry / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in names}
        return {name: np.asarray(array) for name, array in maps.items()}  # as plain arrays, which are faster to index
    except (OSError, ValueError, EOFError) as error:
        _LOG.warning("index maps in %s are damaged (%s); building them again", entry, error)
        return None


def _save(entry: Path, arrays: Arrays, *, remove_leftovers: bool) -> None:
    """Write an entry under another name, then rename it; a damaged one of the same name is removed first.

    remove_leftovers: what processes that died left half written, where it is certain that nobody writes now.
    """
    for leftover in entry.parent.glob(f"{entry.name}.*.partial") if remove_leftovers else ():
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        with atomic_directory(entry) as partial:
            for name, array in arrays.items():
                np.save(partial / f"{name}.npy", array, allow_pickle=False)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):  # then another node was first, with the same arrays
            raise
