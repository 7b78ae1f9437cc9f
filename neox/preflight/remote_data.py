"""Download of remote token files to `data_cache_dir`, before anything is planned.

With `data_cache_gb` only the index and the sidecar are copied; the ids are read by blocks
(`neox.data.token_files.remote_blocks`).
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from neox.config import Decided, Decision, NeoXConfig
from neox.errors import DataError, os_errors
from neox.files import atomic_write, lock_file, write_text
from neox.log import get_logger
from neox.problems import Problem
from neox.storage import FileState, RemoteIds, ids_file, is_remote, open_file, shown, state_of

_log = get_logger(__name__)
_SUFFIXES = (".bin", ".idx", ".json")
_PIECE_BYTES = 8 << 20


def fetch_data(config: NeoXConfig) -> Decided:
    """Copy remote token files, and decide that the run reads the copies.

    Existing copies are kept if the server still reports the same version.

    Raises:
        DataError: If a file cannot be read, or the disk has too little space.
    """
    directory = Path(config.data.data_cache_dir)
    limits = _block_limits(config)

    def local(address: str) -> str:
        if address in limits:
            return str(prepare_blocks(address, directory, _block_directory(config), limits[address]))
        return str(fetch_token_files(address, directory))

    return Decided(_decide_paths(config, local))


def planned_data(config: NeoXConfig) -> Decided:
    """Return the result of `fetch_data` without copying anything, for a dry run.

    Addresses with an up-to-date copy are replaced by it. Other addresses stay, and notes say what a start will copy,
    or read by blocks.
    """
    directory = Path(config.data.data_cache_dir)
    notes: dict[str, str] = {}
    problems: dict[str, Problem] = {}
    try:
        limits = _block_limits(config)
    except DataError as error:
        return Decided(problems=(Problem((), str(error)),))

    def planned(address: str) -> str:
        prefix = _prefix_of_copy(address, directory)
        try:
            wanted = _wanted(address, prefix)
        except DataError as error:
            problems[address] = Problem((), str(error))
            return address
        if not wanted:
            return str(prefix)
        if address in limits and ".bin" in wanted:
            size = wanted[".bin"].size
            blocks = _block_directory(config)
            notes[address] = _block_note(address, size, limits[address], blocks)
            has_index = len(wanted) == 1 and ids_file(prefix).suffix == ".json"
            return str(prefix) if has_index else address
        size = sum(state.size for state in wanted.values())
        notes[address] = f"{shown(address)}, {size:,} bytes, will be copied to {directory} at the start"
        return address

    return Decided(_decide_paths(config, planned), tuple(notes.values()), tuple(problems.values()))


def _block_note(address: str, size: int, limit: int, directory: Path) -> str:
    note = f"{shown(address)}, {size:,} bytes, is read by blocks, of which each host keeps at most {limit:,} bytes in "
    note += str(directory)
    if limit < size:
        note += "; what does not fit is fetched again in every pass, with the whole block around each sample"
    return note


def _block_directory(config: NeoXConfig) -> Path:
    keys = config.data
    return Path(keys.data_block_dir or Path(keys.data_cache_dir, "blocks"))


def _block_limits(config: NeoXConfig) -> dict[str, int]:
    """Return the most bytes of each `.bin` that a host keeps, in proportion to their sizes; empty to copy whole files.

    Raises:
        DataError: If a file cannot be read.
    """
    most = config.data.data_cache_gb
    if most is None:
        return {}
    sizes = {}
    for address in {address for value in _addressed_keys(config).values() for address in _addresses(value)}:
        sizes[address] = state_of(f"{address}.bin").size
    total = max(1, sum(sizes.values()))
    return {address: min(size, int(most * 1e9 * size / total)) for address, size in sizes.items()}


def _decide_paths(config: NeoXConfig, path_of: Callable[[str], str]) -> tuple[Decision, ...]:
    """Return decisions in which `path_of` replaces the addresses of token files."""
    decisions = []
    for key, value in _addressed_keys(config).items():
        replaced = _replaced(value, path_of)
        if replaced != value:
            reason = f"{key}: token files at addresses are read from their copies in {config.data.data_cache_dir}"
            decisions.append(Decision(key, replaced, reason, config.source(key).derived("data_cache_dir")))
    return tuple(decisions)


def _addressed_keys(config: NeoXConfig) -> dict[str, Any]:
    """Return the keys of token files whose values have addresses."""
    keys = {}
    for key, value in config.to_flat().items():
        if key.endswith(("data_path", "data_paths")) and any(_addresses(value)):
            keys[key] = value
    return keys


def _addresses(value: Any) -> Iterator[str]:
    """Yield the addresses in the value of a key."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for each in value:
            yield from _addresses(each)
    elif isinstance(value, str) and is_remote(value):
        yield value


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
                    "set data_cache_dir to a directory on a larger disk, or data_cache_gb to keep only a part on disk"
                )
            if wanted:
                _log.info("copying %s, %.2f GB, to %s", shown(address), needed / 1e9, folder)
            for suffix, state in wanted.items():
                _copy(address + suffix, Path(f"{prefix}{suffix}"), state)
    return prefix


def prepare_blocks(address: str, directory: Path, blocks: Path, limit: int) -> Path:
    """Return the prefix of a local index of `ADDRESS.bin`, with a description by which ranks read the ids by blocks.

    If a whole copy is there and still the same, nothing is changed.

    Args:
        address: Address without the suffix.
        directory: Directory of copies. One process at a time writes into it.
        blocks: Directory of the blocks.
        limit: Most bytes of ids that a host keeps.

    Raises:
        DataError: If a file cannot be read, or the disk is too small.
    """
    prefix = _prefix_of_copy(address, directory)
    folder = prefix.parent
    with os_errors(DataError, f"data_cache_dir: {directory} cannot be written"):
        folder.mkdir(parents=True, exist_ok=True)
        blocks.mkdir(parents=True, exist_ok=True)
        with open(folder / ".lock", "w") as lock:
            lock_file(lock, wait=True)
            wanted = _wanted(address, prefix)
            ids = wanted.pop(".bin", None)
            for suffix, state in wanted.items():
                _copy(address + suffix, Path(f"{prefix}{suffix}"), state)
            if ids is None:
                return prefix
            whole = Path(f"{prefix}.bin")
            whole.unlink(missing_ok=True)
            version = hashlib.sha256(str(ids.version).encode()).hexdigest()[:12]
            place = blocks.absolute() / f"{folder.name}-{version}"
            _check_room(address, limit, blocks, place)
            description = RemoteIds(f"{address}.bin", ids.size, str(ids.version), limit, str(place), _checksum(prefix))
            write_text(Path(f"{prefix}.remote.json"), description.to_json())
    _log.info("%s, %.2f GB, is read by blocks; %s keeps %.2f GB", shown(address), ids.size / 1e9, blocks, limit / 1e9)
    return prefix


def _check_room(address: str, limit: int, blocks: Path, place: Path) -> None:
    """Raise DataError if a disk is too small for the blocks of a file, those that are there already included."""
    there = 0
    for file in place.glob("*/blocks"):
        there = max(there, file.stat().st_blocks * 512)
    free = shutil.disk_usage(blocks).free
    if limit - there > free:
        raise DataError(
            f"{shown(address)} may take {limit / 1e9:.1f} GB of blocks, and {blocks} has {free / 1e9:.1f} GB free; "
            "set data_cache_gb to less, or data_block_dir to a larger disk"
        )


def _checksum(prefix: Path) -> int | None:
    """Return the checksum of the `.bin` in a sidecar; None if there is none. The ranks report a broken sidecar."""
    try:
        found = json.loads(Path(f"{prefix}.json").read_text(encoding="utf-8")).get("crc32")
    except (OSError, ValueError, AttributeError):
        return None
    return found if isinstance(found, int) else None


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
