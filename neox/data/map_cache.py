"""Index maps kept on disk: named by what they follow from, built by one process of a node, then memory-mapped."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from neox.data.index_maps import IndexMaps, build_index_maps
from neox.log import get_logger

_LOG = get_logger(__name__)
_FORMAT = "neox index maps 1"
_FILES = ("document_map", "sample_map", "shuffle_map")


def load_or_build(
    cache_dir: str | Path, sizes: np.ndarray, documents: range, *, num_samples: int, seq_length: int, seed: int
) -> IndexMaps:
    """Return the maps, memory-mapped from `cache_dir`; the first process to ask builds them, the others wait for it.

    The key is a hash of the documents' lengths and of every parameter, so data that was tokenized again never meets old
    maps. Where the directory cannot be written, the maps are built in memory, with a warning.
    """
    arguments = {"num_samples": num_samples, "seq_length": seq_length, "seed": seed}
    entry = Path(cache_dir) / content_key(sizes, documents, **arguments)
    maps = _load(entry)
    if maps is not None:
        return maps
    try:
        with _locked(entry.with_suffix(".lock")):
            maps = _load(entry)  # another process may have built them while this one waited
            if maps is None:
                _save(entry, build_index_maps(sizes, documents, **arguments))
                maps = _load(entry)
    except OSError as error:
        _LOG.warning("cannot keep index maps in %s (%s); building them in memory", cache_dir, error.strerror or error)
        return build_index_maps(sizes, documents, **arguments)
    assert maps is not None
    return maps


def content_key(sizes: np.ndarray, documents: range, *, num_samples: int, seq_length: int, seed: int) -> str:
    """A hash of all that the maps depend on."""
    digest = hashlib.sha256(f"{_FORMAT} {documents} {num_samples} {seq_length} {seed} {sizes.dtype}\n".encode())
    digest.update(np.ascontiguousarray(sizes[documents.start : documents.stop]).data)
    return digest.hexdigest()[:32]


def _load(entry: Path) -> IndexMaps | None:
    """Map a finished entry; a directory is only ever renamed into place whole."""
    if not entry.is_dir():
        return None
    try:
        return IndexMaps(*(np.load(entry / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in _FILES))
    except (OSError, ValueError) as error:
        _LOG.warning("index maps in %s are damaged (%s); building them again", entry, error)
        shutil.rmtree(entry, ignore_errors=True)
        return None


def _save(entry: Path, maps: IndexMaps) -> None:
    """Write an entry under another name, then rename it."""
    temporary = Path(tempfile.mkdtemp(prefix=f"{entry.name}.", suffix=".partial", dir=entry.parent))
    try:
        for name in _FILES:
            np.save(temporary / f"{name}.npy", getattr(maps, name), allow_pickle=False)
        os.chmod(temporary, 0o755)
        os.rename(temporary, entry)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
        if not entry.is_dir():  # else another node on a shared file system was first, with the same arrays
            raise


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock that the kernel releases when its owner dies, so that no stale lock can hang a later run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
