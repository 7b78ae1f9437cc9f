"""Partial copies of remote checkpoints: each tensor file is fetched when a rank first reads it.

CACHE/s3/bucket/run/global_step10/manifest.json                     lists all files of the checkpoint
CACHE/s3/bucket/run/global_step10/.origin                           s3://bucket/run
CACHE/s3/bucket/run/global_step10/layer_00-...pt                    fetched
CACHE/s3/bucket/run/global_step10/layer_02-...pt -> .not-fetched/   not fetched: a dangling symbolic link
CACHE/s3/bucket/run/global_step10/.fetching/layer_02-...pt          download in progress, with a lock file next to it

The ranks that share the directory (those of one host, or of all hosts) fetch each file once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from neox.checkpoint.remote.mirror import Mirror
from neox.checkpoint_files.manifest import NOT_FETCHED, is_unfetched, read_manifest
from neox.checkpoint_files.names import (
    parse_averaged_file,
    parse_layer_file,
    parse_mp_rank_file,
    parse_optimizer_file,
    parse_step_directory,
)
from neox.errors import CheckpointError, os_errors
from neox.files import lock_file, replace_file, write_text
from neox.launch import report_progress
from neox.log import get_logger

_log = get_logger(__name__)
_ORIGIN = ".origin"
_FETCHING = ".fetching"
_THREADS = 4
T = TypeVar("T")


def holds_tensors(name: str) -> bool:
    """Return whether a file, given by name, holds tensors. Only ranks read such files."""
    parsers = (parse_layer_file, parse_optimizer_file, parse_averaged_file, parse_mp_rank_file)
    return any(parse(name) is not None for parse in parsers)


def origin_of(checkpoint: Path) -> str | None:
    """Return the remote directory that a partial copy comes from; None for other directories.

    Raises:
        CheckpointError: If the address cannot be read.
    """
    path = checkpoint / _ORIGIN
    with os_errors(CheckpointError, f"{path} cannot be read"):
        if not path.is_file():
            return None
        return path.read_text(encoding="utf-8")


def write_origin(checkpoint: Path, address: str) -> None:
    """Mark a directory as a partial copy. Call it after `promise_files`. Raises OSError."""
    write_text(checkpoint / _ORIGIN, address)


def promise_files(checkpoint: Path, names: Iterable[str]) -> None:
    """Create dangling links in place of files that do not exist. Raises OSError."""
    for name in names:
        path = checkpoint / name
        if not path.exists() and not path.is_symlink():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(f"{NOT_FETCHED}/{path.name}")


def fetch_files(paths: Iterable[Path]) -> None:
    """Fetch the given files that are not fetched yet, several at a time. Raises as `fetch_file`."""
    missing = list(filter(is_unfetched, paths))
    if missing:
        in_threads(fetch_file, missing)


def in_threads(action: Callable[[T], None], items: Iterable[T]) -> None:
    """Do something with each item, several at a time. The first error ends it, and is raised."""
    pool = ThreadPoolExecutor(_THREADS)
    try:
        for _ in pool.map(action, items):
            pass
    finally:
        pool.shutdown(cancel_futures=True)


def fetch_file(path: Path) -> None:
    """Fetch a file of a partial copy, unless another process has fetched it in the meantime.

    Raises:
        CheckpointError: If the server refuses access, or the file is damaged.
    """
    checkpoint = path.parent
    origin = origin_of(checkpoint)
    manifest = read_manifest(checkpoint)
    iteration = parse_step_directory(checkpoint.name)
    if origin is None or manifest is None or iteration is None or path.name not in manifest.files:
        raise CheckpointError(
            f"{path} was not fetched, and {checkpoint} does not record its origin; remove {checkpoint}"
        )
    record = manifest.files[path.name]
    partial = checkpoint / _FETCHING / path.name
    with os_errors(CheckpointError, f"{path} cannot be written"):
        partial.parent.mkdir(exist_ok=True)
        with open(partial.with_name(f"{path.name}.lock"), "w") as lock:
            lock_file(lock, wait=True)
            if not is_unfetched(path):
                return
            _log.info("fetching %s of %s, %.2f GB", path.name, origin, record.size / 1e9)
            Mirror(origin).download(iteration, path.name, partial, record, report_progress)
            replace_file(partial, path)
