"""Manifest of a checkpoint: size and sha256 of every file. It is written last, so its presence means "complete"."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from neox.checkpoint_files.names import MANIFEST, parse_layer_file
from neox.errors import CheckpointError, os_errors
from neox.files import fsync_path, sha256_of, write_text

_VERSION = 1
NOT_FETCHED = ".not-fetched"
"""Directory, which does not exist, that links in the places of files name which a partial copy does not hold yet."""


@dataclass(frozen=True)
class FileRecord:
    """One file's size in bytes and sha256 in hex."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Content of a complete checkpoint.

    Attributes:
        iteration: Completed steps.
        sequence: Number of the commit in its directory, from 1. The larger one of two was committed later.
        files: Relative path -> record.
    """

    iteration: int
    sequence: int
    files: Mapping[str, FileRecord]

    def to_json(self) -> str:
        """Return the text of `manifest.json`."""
        content = {
            "version": _VERSION,
            "iteration": self.iteration,
            "sequence": self.sequence,
            "files": {name: asdict(record) for name, record in sorted(self.files.items())},
        }
        return json.dumps(content, indent=1) + "\n"


def hash_file(path: Path) -> FileRecord:
    """Return a file's size and sha256. Raises OSError."""
    return FileRecord(path.stat().st_size, sha256_of(path))


def hash_files(directory: Path, names: list[str]) -> dict[str, FileRecord]:
    """Hash files in threads, because hashing releases the interpreter lock. Raises OSError."""
    threads = min(16, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads) as pool:
        records = pool.map(lambda name: hash_file(directory / name), names)
        return dict(zip(names, records, strict=True))


def list_files(directory: Path) -> list[str]:
    """Return all files below a directory except the manifest, as sorted relative paths."""
    names = []
    for path in directory.rglob("*"):
        if path.is_file() and path.name != MANIFEST:
            names.append(path.relative_to(directory).as_posix())
    return sorted(names)


def record_share(directory: Path, part: int, parts: int) -> dict[str, FileRecord]:
    """Fsync and hash one share of a directory's files. Ranks share this work.

    Args:
        directory: The directory.
        part: Number of the share, from 0. It holds every `parts`-th file in the order of their sizes.
        parts: Number of shares.

    Raises:
        OSError: If a file cannot be read or synced.
    """
    by_size = sorted(list_files(directory), key=lambda name: ((directory / name).stat().st_size, name), reverse=True)
    return _record(directory, by_size[part::parts])


def write_manifest(
    directory: Path, iteration: int, sequence: int, records: Mapping[str, FileRecord] | None = None
) -> Manifest:
    """Write a directory's manifest durably. Files without a record are fsynced and hashed first. Raises OSError."""
    known = dict(records or {})
    others = [name for name in list_files(directory) if name not in known]
    known |= _record(directory, others)
    for path in directory.rglob("*"):
        if path.is_dir():
            fsync_path(path)
    manifest = Manifest(iteration, sequence, known)
    write_text(directory / MANIFEST, manifest.to_json())
    return manifest


def read_manifest(directory: Path) -> Manifest | None:
    """Read a directory's manifest. Return None if it has none. Raises CheckpointError if it is broken."""
    path = directory / MANIFEST
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{path}: broken manifest ({error})") from error
    return parse_manifest(text, path)


def parse_manifest(text: bytes, path: str | Path) -> Manifest:
    """Return the manifest with a text.

    Args:
        text: Content of a `manifest.json`.
        path: Place of the text, for the message.

    Raises:
        CheckpointError: If it is broken.
    """
    try:
        loaded = json.loads(text)
        if loaded["version"] != _VERSION:
            raise CheckpointError(f"{path}: version {loaded['version']}, this program reads version {_VERSION}")
        files = {}
        for name, record in loaded["files"].items():
            files[name] = FileRecord(int(record["size"]), str(record["sha256"]))
        return Manifest(int(loaded["iteration"]), int(loaded["sequence"]), files)
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: broken manifest ({error})") from error


def _record(directory: Path, names: list[str]) -> dict[str, FileRecord]:
    """Fsync and hash files."""
    for name in names:
        fsync_path(directory / name)
    return hash_files(directory, names)


def is_unfetched(path: Path) -> bool:
    """Return whether a file of a partial copy (`partial_copies`) has not been fetched yet."""
    try:
        return os.readlink(path).startswith(f"{NOT_FETCHED}/")
    except OSError:
        return False


def check_manifest(directory: Path, manifest: Manifest, *, hashes: bool = True) -> list[str]:
    """Compare a directory with its manifest. Files that a partial copy does not hold yet are checked when they come.

    Args:
        directory: The checkpoint.
        manifest: Its manifest.
        hashes: Whether the sha256 of every file is compared too, not only its size.

    Returns:
        One clause per missing, resized or changed file; empty if the checkpoint is complete.
    """
    problems: list[str] = []
    same_size: list[str] = []
    for name, record in manifest.files.items():
        try:
            size = (directory / name).stat().st_size
        except OSError as error:
            if not is_unfetched(directory / name):
                problems.append(f"{name} is missing ({error.strerror})")
            continue
        if size != record.size:
            problems.append(f"{name} has {size} bytes instead of {record.size}")
        else:
            same_size.append(name)
    if not hashes:
        return problems
    try:
        found = hash_files(directory, same_size)
    except OSError as error:
        return [*problems, f"{error.filename} cannot be read ({error.strerror})"]
    for name, record in found.items():
        if record.sha256 != manifest.files[name].sha256:
            problems.append(f"{name} has changed since it was written (sha256 differs)")
    return problems


def hash_of_weights(checkpoint: Path) -> str:
    """Return a hash of a checkpoint's layer files: of their hashes in the manifest, or of their content without one.

    Raises:
        CheckpointError: If a file cannot be read.
    """
    manifest = read_manifest(checkpoint)
    digest = hashlib.sha256()
    for path in sorted(checkpoint.iterdir()):
        if parse_layer_file(path.name) is None:
            continue
        if manifest is not None and path.name in manifest.files:
            record = manifest.files[path.name]
        else:
            with os_errors(CheckpointError, f"{path} cannot be read"):
                record = hash_file(path)
        digest.update(f"{path.name} {record.sha256}\n".encode())
    return digest.hexdigest()
