"""Download of remote token files to `data_cache_dir`, before anything is planned."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from neox.config import NeoXConfig
from neox.errors import DataError, os_errors
from neox.files import atomic_write, lock_file, write_text
from neox.log import get_logger
from neox.preflight.data_decisions import DecidedConfig
from neox.problems import Problem
from neox.storage import FileState, is_remote, open_file, shown, state_of

_log = get_logger(__name__)
_SUFFIXES = (".bin", ".idx", ".json")
_PIECE_BYTES = 8 << 20


def with_local_data(config: NeoXConfig) -> NeoXConfig:
    """Copy remote token files, and return a configuration with the prefixes of the copies in place of the addresses.

    Existing copies are kept if the server still reports the same version.

    Raises:
        DataError: If a file cannot be read, or the disk has too little space.
    """
    directory = Path(config.data.data_cache_dir)
    return _with_paths(config, lambda address: str(fetch_token_files(address, directory)))


def planned_data(config: NeoXConfig) -> DecidedConfig:
    """Return the result of `with_local_data` without copying anything, for a dry run.

    Addresses with an up-to-date copy are replaced by it. Other addresses stay, and notes say what a start will copy.
    """
    directory = Path(config.data.data_cache_dir)
    notes: dict[str, str] = {}
    problems: dict[str, Problem] = {}

    def planned(address: str) -> str:
        prefix = _prefix_of_copy(address, directory)
        try:
            wanted = _wanted(address, prefix)
        except DataError as error:
            problems[address] = Problem((), str(error))
            return address
        if not wanted:
            return str(prefix)
        size = sum(state.size for state in wanted.values())
        notes[address] = f"{shown(address)}, {size:,} bytes, will be copied to {directory} at the start"
        return address

    changed = _with_paths(config, planned)
    return DecidedConfig(changed, tuple(notes.values()), tuple(problems.values()))


def _with_paths(config: NeoXConfig, path_of: Callable[[str], str]) -> NeoXConfig:
    """Return a configuration in which `path_of` replaces the addresses of token files."""
    changes = {}
    for key, value in config.to_flat().items():
        if key.endswith(("data_path", "data_paths")) and _has_address(value):
            changes[key] = _replaced(value, path_of)
    if not changes:
        return config
    return config.updated(changes)


def _has_address(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_address, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_address, value))
    return isinstance(value, str) and is_remote(value)


def _replaced(value: Any, path_of: Callable[[str], str]) -> Any:
    """Return the value of a key with its addresses replaced."""
    if isinstance(value, Mapping):
        return {name: _replaced(each, path_of) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_replaced(each, path_of) for each in value]
    if isinstance(value, str) and is_remote(value):
        return path_of(value)
    return value


def _prefix_of_copy(address: str, directory: Path) -> Path:
    """Return the prefix of the local copy of token files."""
    folder = directory / hashlib.sha256(address.encode()).hexdigest()[:12]
    return folder / address.rpartition("/")[2]


def fetch_token_files(address: str, directory: Path) -> Path:
    """Copy `ADDRESS.bin`, `.idx` and, if there is one, `.json`; return the prefix of the copies.

    Args:
        address: Address without the suffix.
        directory: Directory of copies. One process at a time writes to it.

    Raises:
        DataError: If a file cannot be read, or the disk has too little space.
    """
    prefix = _prefix_of_copy(address, directory)
    folder = prefix.parent
    with os_errors(DataError, f"data_cache_dir: {directory} cannot be written"):
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / ".lock", "w") as lock:
            lock_file(lock, wait=True)
            wanted = _wanted(address, prefix)
            needed = sum(state.size for state in wanted.values())
            free = shutil.disk_usage(folder).free
            if needed > free:
                raise DataError(
                    f"{shown(address)} needs {needed / 1e9:.1f} GB, but {directory} has only {free / 1e9:.1f} GB free; "
                    "set data_cache_dir to a directory on a larger disk"
                )
            if wanted:
                _log.info("copying %s, %.2f GB, to %s", shown(address), needed / 1e9, folder)
            for suffix, state in wanted.items():
                _copy(address + suffix, Path(f"{prefix}{suffix}"), state)
    return prefix


def _wanted(address: str, prefix: Path) -> dict[str, FileState]:
    """Return the files that have no copy yet, or have changed on the server, by suffix."""
    wanted = {}
    for suffix in _SUFFIXES:
        try:
            state = state_of(address + suffix)
        except DataError:
            if suffix == ".json":  # token files of other programs have none
                continue
            raise
        if not _is_current(Path(f"{prefix}{suffix}"), state):
            wanted[suffix] = state
    return wanted


def _is_current(local: Path, state: FileState) -> bool:
    """Return whether a local copy has the server's size and version."""
    if not local.is_file() or local.stat().st_size != state.size:
        return False
    version_file = _version_file(local)
    version = ""
    if version_file.is_file():
        version = version_file.read_text(encoding="utf-8")
    return version == str(state.version)


def _version_file(local: Path) -> Path:
    """Return the file that holds the server's version tag of a copy."""
    return local.with_name(f"{local.name}.version")


def _copy(address: str, target: Path, state: FileState) -> None:
    _version_file(target).unlink(missing_ok=True)
    with open_file(address) as source, atomic_write(target) as out:
        while piece := source.read(_PIECE_BYTES):
            out.write(piece)
    if target.stat().st_size != state.size:
        raise DataError(f"{shown(address)} changed while it was copied; run the command again")
    write_text(_version_file(target), str(state.version))
