"""Local copies of checkpoints in object storage, with every hash checked.

CACHE/s3/bucket/run/global_step10/manifest.json      lists the local files: all, all but optimizer states, or those that
                                                     ranks have read (`partial_copies`)
CACHE/s3/bucket/run/.fetching-global_step10/...      download in progress, or left by a killed process and reused
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from neox.checkpoint.remote.mirror import Mirror
from neox.checkpoint.remote.partial_copies import holds_tensors, in_threads, origin_of, promise_files, write_origin
from neox.checkpoint_files.contents import is_checkpoint
from neox.checkpoint_files.finding import (
    checkpoint_directories,
    contains_checkpoints,
    find_checkpoint,
    names_of_checkpoints,
    step_of,
)
from neox.checkpoint_files.manifest import (
    Manifest,
    check_manifest,
    hash_file,
    is_unfetched,
    parse_manifest,
    read_manifest,
)
from neox.checkpoint_files.names import LATEST, MANIFEST, parse_optimizer_file, step_directory
from neox.config import NeoXConfig
from neox.errors import CheckpointError, ConfigError, os_errors
from neox.files import fsync_path, lock_file, write_text
from neox.log import get_logger
from neox.plan.run_start import StartMode, requested_start
from neox.storage import CHECKPOINT_CACHE, cache_folder, is_remote, named_checkpoint, shown

_log = get_logger(__name__)
_FETCHING = ".fetching-"

Choice = Callable[[str], bool]
"""Function that returns whether a file of a checkpoint, given by name, is needed."""


def add_checkpoint_cache(parser: argparse.ArgumentParser) -> None:
    """Add the flag `--cache-dir` (`cache_dir`), the directory for local copies of remote checkpoints."""
    text = f"directory for copies of remote checkpoints, such as s3://bucket/run (default: {CHECKPOINT_CACHE})"
    parser.add_argument("--cache-dir", metavar="DIRECTORY", help=text)


def all_files(name: str) -> bool:
    """Return True, because resuming a training needs every file."""
    return True


def without_optimizer(name: str) -> bool:
    """Return whether a file does not hold optimizer states. Loading only weights needs just these files."""
    return parse_optimizer_file(name) is None


@dataclass(frozen=True)
class RemoteCheckpoint:
    """Complete checkpoint in object storage.

    Attributes:
        mirror: The directory that holds it.
        iteration: Its iteration.
    """

    mirror: Mirror
    iteration: int

    @property
    def name(self) -> str:
        """Name of its directory."""
        return step_directory(self.iteration)

    def manifest(self) -> Manifest:
        """Read its manifest. Raises CheckpointError."""
        where = f"{shown(self.mirror.address)}/{self.name}/{MANIFEST}"
        return parse_manifest(self.mirror.manifest_text(self.iteration), where)


def find_remote(address: str, iteration: int | None = None) -> RemoteCheckpoint:
    """Return the remote checkpoint at an address.

    Args:
        address: Address of a mirror, or of one checkpoint in it (`.../global_stepN`).
        iteration: Iteration; by default that of the newest complete checkpoint.

    Raises:
        CheckpointError: If there is no such checkpoint, or the server refuses access.
    """
    root, named = named_checkpoint(address)
    if named is not None:
        if iteration is not None and iteration != named:
            raise CheckpointError(f"load: {address} and iteration: {iteration} name different checkpoints")
        iteration = named
    mirror = Mirror(root)
    complete = mirror.iterations()
    if not complete:
        raise CheckpointError(f"{shown(root)} holds no complete checkpoint")
    if iteration is None:
        iteration = complete[-1]
    if iteration not in complete:
        raise CheckpointError(f"{shown(root)} holds no complete checkpoint of iteration {iteration}, only {complete}")
    return RemoteCheckpoint(mirror, iteration)


def cached_checkpoint(
    address: str, cache: str | Path, iteration: int | None = None, needed: Choice = all_files
) -> Path:
    """Fetch a remote checkpoint into a local cache, unless it is there, and return the local copy.

    Args:
        address: Address of a mirror, or of one checkpoint in it (`.../global_stepN`).
        cache: Directory of the cache, with a subdirectory for each mirror.
        iteration: Iteration; by default that of the newest complete checkpoint.
        needed: Choice of files.

    Raises:
        CheckpointError: As `fetch_checkpoint`.
    """
    remote = find_remote(address, iteration)
    return fetch_checkpoint(remote, cache_folder(remote.mirror.address, cache), needed)


def fetch_checkpoint(remote: RemoteCheckpoint, directory: Path, needed: Choice = all_files) -> Path:
    """Fetch the files of a checkpoint into a directory of checkpoints. Files that exist already are not fetched.

    Args:
        remote: The checkpoint.
        directory: Directory for the copy. One process at a time fetches into it.
        needed: Choice of files.

    Raises:
        CheckpointError: If the server refuses access, files are damaged, or the directory has another checkpoint of
            this iteration.
    """
    with _exclusive(directory):
        return _fetch(remote, directory, needed)


@contextmanager
def _exclusive(directory: Path) -> Iterator[None]:
    """Lock a directory against other fetching processes. OSErrors in the block become CheckpointErrors."""
    with os_errors(CheckpointError, f"{directory} cannot be written"):
        directory.mkdir(parents=True, exist_ok=True)
        with open(directory / f"{_FETCHING}lock", "w") as lock:
            lock_file(lock, wait=True)
            yield


def partial_copy(remote: RemoteCheckpoint, directory: Path) -> Path:
    """Create a copy of a checkpoint whose tensor files are fetched when they are first read.

    Args:
        remote: The checkpoint.
        directory: Directory for the copy. One process at a time makes it.

    Raises:
        CheckpointError: As `fetch_checkpoint`.
    """
    final = directory / remote.name
    whole = remote.manifest()
    if origin_of(final) is not None and has_copy(final, whole, all_files):
        return final
    with _exclusive(directory):
        if origin_of(final) is not None and has_copy(final, whole, all_files):  # another rank of this host has made it
            return final
        _fetch(remote, directory, lambda name: not holds_tensors(name))
        here = _manifest_of_copy(final, whole, remote)
        if here.files.keys() != whole.files.keys():
            promise_files(final, whole.files.keys() - here.files.keys())
            write_text(final / MANIFEST, whole.to_json())
            write_origin(final, remote.mirror.address)
        return final


def _fetch(remote: RemoteCheckpoint, directory: Path, needed: Choice) -> Path:
    final = directory / remote.name
    whole = remote.manifest()
    here = _manifest_of_copy(final, whole, remote)
    wanted = filter(needed, whole.files)
    missing = [name for name in wanted if name not in here.files or is_unfetched(final / name)]
    if not missing and final.exists():
        write_text(directory / LATEST, final.name)
        return final
    staged = directory / f"{_FETCHING}{remote.name}"
    staged.mkdir(exist_ok=True)
    started = time.monotonic()
    _download(remote, staged, whole, missing)
    there = {name: record for name, record in whole.files.items() if name in here.files or name in missing}
    text = replace(whole, files=there).to_json()
    if final.exists():
        for name in missing:
            (final / name).parent.mkdir(parents=True, exist_ok=True)
            (staged / name).replace(final / name)
            fsync_path((final / name).parent)
        write_text(final / MANIFEST, text)
    else:
        write_text(staged / MANIFEST, text)
        staged.rename(final)
        fsync_path(directory)
    write_text(directory / LATEST, final.name)
    _log.info("fetched %s in %.0f s", final, time.monotonic() - started)
    return final


def checkpoint_at(given: str | Path, cache: str | Path | None = None, needed: Choice = without_optimizer) -> Path:
    """Return the checkpoint that a tool is given: the directory itself, or the newest complete one in it.

    Args:
        given: The directory, or its address in object storage, which is then copied to this machine.
        cache: Directory of such copies, by default CHECKPOINT_CACHE.
        needed: Choice of the files to copy.

    Raises:
        ConfigError: If the directory is not a checkpoint and holds none.
        CheckpointError: If none in it is complete, or it cannot be fetched.
    """
    if is_remote(given):
        return cached_checkpoint(str(given), cache or CHECKPOINT_CACHE, needed=needed)
    path = Path(given)
    if not path.is_dir():
        raise ConfigError(f"{path} is not a directory{_beside(path)}; give the global_stepN directory of a checkpoint")
    if is_checkpoint(path):
        return path
    if contains_checkpoints(path):  # gpt-neox's converter of Llama names it `0`
        return find_checkpoint(path, verify=False, way_out="give another directory")
    inner = [child for child in sorted(path.iterdir()) if child.is_dir() and checkpoint_directories(child)]
    if len(inner) == 1:  # the directory of a run, which also holds its logs
        return find_checkpoint(inner[0], verify=False, way_out="give another directory")
    if inner:
        raise ConfigError(f"{path} has several directories of checkpoints: give one of {', '.join(map(str, inner))}")
    raise ConfigError(
        f"{path} has no model files and no global_stepN directories; give the global_stepN directory of a checkpoint"
    )


def _beside(path: Path) -> str:
    """Return the names of the checkpoints in the parent of a missing directory, for a message."""
    if not path.parent.is_dir():
        return ""
    names = names_of_checkpoints(path.parent)
    if not names:
        return ""
    return f" ({path.parent} has {names})"


def has_copy(path: Path, whole: Manifest, needed: Choice) -> bool:
    """Return whether a directory is a copy of a checkpoint with all files that are needed."""
    here = _manifest_of(path, whole)
    return here is not None and all(name in here.files for name in whole.files if needed(name))


def _manifest_of(path: Path, whole: Manifest) -> Manifest | None:
    """Return the manifest of a copy of a checkpoint, whole or not; None if a directory is none."""
    here = read_manifest(path)
    if here is None or here.sequence != whole.sequence or not here.files.items() <= whole.files.items():
        return None
    if check_manifest(path, here, hashes=False):
        return None
    return here


def _manifest_of_copy(final: Path, whole: Manifest, remote: RemoteCheckpoint) -> Manifest:
    """Return the manifest of the files that are here already. Raises CheckpointError for another checkpoint."""
    if not final.exists():
        return replace(whole, files={})
    here = _manifest_of(final, whole)
    if here is not None:
        return here
    raise CheckpointError(f"{final} exists and is not the checkpoint of {shown(remote.mirror.address)}; remove it")


def _download(remote: RemoteCheckpoint, staged: Path, whole: Manifest, names: Iterable[str]) -> None:
    """Write files to a directory, several at a time, except those that a killed process has left there complete."""
    wanted = [name for name in names if not _is_there(staged / name, whole, name)]
    total = sum(whole.files[name].size for name in wanted)
    _log.info("fetching %s, %.2f GB in %d files", remote.name, total / 1e9, len(wanted))

    def download(name: str) -> None:
        remote.mirror.download(remote.iteration, name, staged / name, whole.files[name])

    in_threads(download, wanted)


def _is_there(file: Path, whole: Manifest, name: str) -> bool:
    return file.is_file() and hash_file(file) == whole.files[name]


def with_local_load(config: NeoXConfig, *, trains: bool) -> NeoXConfig:
    """Return a configuration whose `load` is a local directory: an address is replaced by a copy of its checkpoint.

    Args:
        config: The configuration.
        trains: Whether optimizer states may be needed.

    Raises:
        CheckpointError: If the checkpoint cannot be fetched.
    """
    keys = config.checkpoint
    if keys.load is None or not is_remote(keys.load):
        return config
    if trains and returns_to_save(config):
        return _with_restored_save(config)
    if trains:
        remote = find_remote(keys.load, keys.iteration)
        found = partial_copy(remote, cache_folder(remote.mirror.address, keys.checkpoint_cache_dir))
    else:
        found = cached_checkpoint(keys.load, keys.checkpoint_cache_dir, keys.iteration, without_optimizer)
    return config.updated(local_keys(keys.load, found.parent))


def local_keys(address: str, directory: Path) -> dict[str, Any]:
    """Return the keys that name a copy of a checkpoint in place of its address.

    The newest checkpoint has no iteration: when the mirror has a newer one, it is still the same run.
    """
    named = named_checkpoint(address)[1]
    if named is None:
        return {"load": str(directory)}
    return {"load": str(directory), "iteration": named}


def needed_files(config: NeoXConfig, *, trains: bool) -> Choice:
    """Return the choice of files that a run reads of its checkpoint.

    Args:
        config: The configuration.
        trains: Whether optimizer states may be needed.
    """
    if trains and requested_start(config).mode is StartMode.RESUME:
        return all_files
    return without_optimizer


def returns_to_save(config: NeoXConfig) -> bool:
    """Return whether `load` is the mirror of the run's own `save`, so that new hosts resume where others ended."""
    keys = config.checkpoint
    if keys.load is None or keys.save is None or keys.checkpoint_mirror is None:
        return False
    if requested_start(config).mode is StartMode.FINETUNE:
        return False
    return keys.load.rstrip("/") == keys.checkpoint_mirror.rstrip("/")


def _with_restored_save(config: NeoXConfig) -> NeoXConfig:
    """Fetch the mirror's newest checkpoint into `save`, unless one as new is there, and let the run load from `save`.

    If there is no checkpoint in either place, the run begins.
    """
    keys = config.checkpoint
    assert keys.load is not None
    assert keys.save is not None
    save = Path(keys.save)
    local = [step_of(path) for path in checkpoint_directories(save)]
    complete = Mirror(keys.load).iterations()
    wanted = keys.iteration
    if wanted is None:
        newest = max(complete, default=None)
        is_behind = newest is not None and all(step is None or step < newest for step in local)
        if is_behind:
            wanted = newest
    if wanted is not None and wanted not in local:
        fetch_checkpoint(find_remote(keys.load, wanted), save)
    return config.updated({"load": keys.save}, source=config.source("save").derived("load"))
