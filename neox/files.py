"""Atomic file and directory replacement, fsync and advisory file locks."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO

_UNSUPPORTED = {errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP}


def partial_path(path: Path) -> Path:
    """Return `PATH.partial`, the name under which the data of `path` are written until they are complete."""
    return path.with_name(f"{path.name}.partial")


@contextmanager
def atomic_write(path: Path, partial: Path | None = None) -> Iterator[BinaryIO]:
    """Open a binary file that replaces `path` once the block has ended without an exception.

    The data are written to another file, fsynced and renamed, so that readers see the old content or the new one. An
    exception removes the new file and leaves `path` unchanged.

    Args:
        path: File to create or replace; its directory is created.
        partial: Name of the file until it is complete. The default, `PATH.partial`, is overwritten by the next call if
            this process is killed; two processes must not write one `path` at the same time.

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


def write_text(path: Path, text: str | Iterable[str]) -> None:
    """Replace a UTF-8 text file atomically; the last of several concurrent writers wins.

    Args:
        path: File to create or replace; its directory is created.
        text: Content, whole or in parts. An exception of the iterable leaves `path` unchanged.

    Raises:
        OSError: If a file or directory cannot be written.
    """
    with atomic_write(path, _temporary(path)) as file:
        file.writelines(part.encode() for part in ([text] if isinstance(text, str) else text))


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Yield an empty directory that replaces `path` once the block has ended without an exception.

    Its files are not fsynced. An exception removes it and leaves `path` unchanged. The old content is renamed to
    `PATH.XXXXXXXX.old` before the new one is renamed, and removed last: there it remains if this process is killed
    between the two renames, or if it cannot be removed.

    Args:
        path: Directory to create or replace (a file of this name is replaced too); its parent is created. Where it is a
            symbolic link, what it leads to is replaced.

    Raises:
        OSError: If something cannot be written; ENOTEMPTY or EEXIST if another process created `path` meanwhile.
    """
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.urandom(4).hex()}.partial")
    try:
        partial.mkdir()
        yield partial
        _exchange(partial, path, partial.with_suffix(".old"))
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _exchange(new: Path, path: Path, old: Path) -> None:
    """Rename `path`, if it exists, to `old`, and `new` to `path`; then remove `old`. Undo it at an exception."""
    try:
        with suppress(FileNotFoundError):
            os.rename(path, old)
        os.rename(new, path)
    except BaseException:
        with suppress(OSError):
            os.rename(old, path)
        raise
    finally:
        if path.exists():  # the new content, another process's, or the old content, which is not at `old` then
            if old.is_dir():
                shutil.rmtree(old, ignore_errors=True)
            else:
                old.unlink(missing_ok=True)


def _temporary(path: Path) -> Path:
    """Return a hidden name beside `path` that no other process of this host uses."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def replace_file(source: Path, target: Path) -> None:
    """Rename a fsynced file over `target`, in the same directory, durably. Raises OSError."""
    os.replace(source, target)
    fsync_path(target.parent)


def fsync_file(file: IO[Any]) -> None:
    """Write the buffer of an open file, and wait until its content is on disk. Raises OSError."""
    file.flush()
    os.fsync(file.fileno())


def fsync_path(path: Path) -> None:
    """Wait until the content of a file, or the entries of a directory, are on disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:  # some network file systems cannot fsync a directory
        if error.errno not in _UNSUPPORTED or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


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
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
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
    """Create the directory of `path`, and a file in it for a moment. Raises OSError if that fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    probe = _temporary(path)
    probe.touch()
    probe.unlink()


def unwritable_parent(path: Path) -> Path | None:
    """Return the nearest existing parent of `path` if nothing can be created in it, else None; creates nothing."""
    parent = next(parent for parent in path.absolute().parents if parent.exists())
    return None if parent.is_dir() and os.access(parent, os.W_OK) else parent
