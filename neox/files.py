"""Atomic file and directory replacement, small files of JSON, fsync and advisory file locks."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO

_PLACEHOLDERS = {
    b"version https://git-lfs.github.com/spec/": "a pointer of Git LFS instead of the data: run `git lfs pull`",
    b"/annex/objects/": "a pointer of git-annex instead of the data: run `git annex get`",
}
_UNSUPPORTED = {errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP}


def placeholder(head: bytes) -> str | None:
    """Return which tool's placeholder a file is, by its first bytes, and what fetches the data; None if it is none."""
    return next((what for mark, what in _PLACEHOLDERS.items() if head.startswith(mark)), None)


def placeholder_at(path: Path) -> str | None:
    """Return the same as `placeholder` for a file; None if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return placeholder(file.read(64))
    except OSError:
        return None


def partial_path(path: Path) -> Path:
    """Return `PATH.partial`, the name of a file until its content is complete."""
    return path.with_name(f"{path.name}.partial")


@contextmanager
def atomic_write(path: Path, partial: Path | None = None) -> Iterator[BinaryIO]:
    """Open a binary file that replaces `path` once the block has ended without an exception.

    The data are written to another file, which is fsynced and renamed. Readers see either the old content or the new
    one. An exception removes the new file and leaves `path` unchanged.

    Args:
        path: File to create or replace; its directory is created.
        partial: Name of the file until it is complete, by default `PATH.partial`. With the default, two processes
            must not write one `path` at the same time. A file that a killed process left is overwritten.

    Raises:
        OSError: If a file or directory cannot be written.
    """
    partial = partial or partial_path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(partial, "wb") as file:
            yield file
            fsync_file(file)
        replace_file(partial, path)
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def atomic_shared_write(path: Path) -> AbstractContextManager[BinaryIO]:
    """Open a file as `atomic_write` does. If several processes write it at the same time, the last one wins.

    Args:
        path: File to create or replace, a small one: a killed process leaves its part under a name of its own.
    """
    return atomic_write(path, _temporary(path))


def write_text(path: Path, text: str | Iterable[str]) -> None:
    """Replace a UTF-8 text file atomically. If several processes write it at the same time, the last one wins.

    Args:
        path: File to create or replace; its directory is created.
        text: Content, as one text or as parts. An exception of the iterable leaves `path` unchanged.

    Raises:
        OSError: If a file or directory cannot be written.
    """
    with atomic_shared_write(path) as file:
        parts = [text] if isinstance(text, str) else text
        for part in parts:
            file.write(part.encode())


@contextmanager
def atomic_directory(path: Path, kept: Path | None = None) -> Iterator[Path]:
    """Yield an empty directory that replaces `path` once the block has ended without an exception.

    The files in it are not fsynced. An exception removes the new directory and leaves `path` unchanged. The old
    directory is first renamed to `PATH.XXXXXXXX.old`, then the new one gets its name, and then the old one is removed.
    If this process is killed between the two renames, the old content is found under that name.

    Args:
        path: Directory to create or replace (a file of this name is replaced too); its parent is created. If it is a
            symbolic link, the target of the link is replaced.
        kept: New name of the old directory, in the same file system; None removes it.

    Raises:
        OSError: If something cannot be written; ENOTEMPTY or EEXIST if another process created `path` meanwhile.
    """
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.urandom(4).hex()}.partial")
    try:
        partial.mkdir()
        yield partial
        _exchange(partial, path, kept or partial.with_suffix(".old"), keep=kept is not None)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _exchange(new: Path, path: Path, old: Path, *, keep: bool) -> None:
    """Rename `path` (if it exists) to `old` and `new` to `path`, then remove `old` unless it is kept.

    An exception undoes the renames.
    """
    try:
        with suppress(FileNotFoundError):
            os.rename(path, old)
        os.rename(new, path)
    except BaseException:
        with suppress(OSError):
            os.rename(old, path)
        raise
    finally:
        # `path` exists unless both renames have failed: then `old` is the only copy of the old content, and stays.
        if path.exists() and not keep:
            if old.is_dir():
                shutil.rmtree(old, ignore_errors=True)
            else:
                old.unlink(missing_ok=True)


def _temporary(path: Path) -> Path:
    """Return a hidden name in the directory of `path` that no other process of this host uses."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a small file; an empty one if the file is missing or damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def replace_file(source: Path, target: Path) -> None:
    """Rename a fsynced file to `target` on the same file system, and fsync its directory. Raises OSError."""
    os.replace(source, target)
    fsync_path(target.parent)


def replace_link(link: Path, target: str) -> None:
    """Make a symbolic link with a target relative to its directory, in place of an older link. Raises OSError."""
    temporary = _temporary(link)
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    replace_file(temporary, link)


def fsync_file(file: IO[Any]) -> None:
    """Flush an open file, and wait until its content is on disk. Raises OSError."""
    file.flush()
    os.fsync(file.fileno())


def fsync_path(path: Path) -> None:
    """Wait until a file's content or a directory's entries are on disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:  # some network file systems cannot fsync a directory
        if error.errno not in _UNSUPPORTED or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def lock_file_shared(file: IO[Any]) -> None:
    """Take the advisory lock of an open file together with other readers, and wait while a process has it alone.

    It does nothing on a file system without locks. The kernel releases the lock when the file is closed.

    Raises:
        OSError: If locking fails for another reason.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_SH)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise


def lock_file(file: IO[Any], *, wait: bool) -> bool:
    """Take the exclusive advisory lock of an open file; the kernel releases it when the file is closed.

    Args:
        file: File to lock with `flock`. A process that dies releases its locks, so that no stale lock remains.
        wait: Whether to wait while another process holds the lock.

    Returns:
        True if the lock is held; False on a file system without locks (some network file systems).

    Raises:
        BlockingIOError: If another process holds the lock and `wait` is false.
        OSError: If locking fails for another reason.
    """
    operation = fcntl.LOCK_EX
    if not wait:
        operation |= fcntl.LOCK_NB
    try:
        fcntl.flock(file, operation)
    except OSError as error:
        if isinstance(error, BlockingIOError) or error.errno not in _UNSUPPORTED:
            raise
        return False
    return True


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal. Raises OSError if it cannot be read."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_writable(path: Path) -> None:
    """Check that `path` can be written: create its directory, and a file there for a moment. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    probe = _temporary(path)
    probe.touch()
    probe.unlink()


def unwritable_parent(path: Path) -> Path | None:
    """Return the nearest existing parent of `path` if nothing can be created in it, else None. It creates nothing."""
    parent = path.absolute().parent
    while not parent.exists():
        parent = parent.parent
    if parent.is_dir() and os.access(parent, os.W_OK):
        return None
    return parent
