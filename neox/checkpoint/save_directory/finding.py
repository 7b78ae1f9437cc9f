"""Finding the checkpoint to load, checking that it is complete, and deleting old ones."""

from __future__ import annotations

import os
import time
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from neox.checkpoint.manifest import check_manifest, read_manifest
from neox.checkpoint.names import (
    LATEST,
    parse_averaged_file,
    parse_layer_file,
    parse_mp_rank_file,
    parse_step_directory,
    step_directory,
)
from neox.checkpoint.remote.fetching import Choice, cached_checkpoint, without_optimizer
from neox.checkpoint.save_directory.staging import (
    PENDING,
    checkpoint_directories,
    delete_checkpoint,
    is_kept_from_deletion,
)
from neox.checkpoint.weights.layer_sources import open_source
from neox.errors import CheckpointError, ConfigError, NoCheckpointError
from neox.log import get_logger
from neox.storage import CHECKPOINT_CACHE, is_remote

_log = get_logger(__name__)

WITHOUT_LOAD = "remove `load` to start from scratch"
"""What a user can do if the key `load` leads to no checkpoint."""


def find_checkpoint(
    load: str | Path,
    iteration: int | None = None,
    *,
    verify: bool = True,
    way_out: str = WITHOUT_LOAD,
) -> Path:
    """Return the checkpoint directory to load, and log the choice and its reason.

    The checkpoint that `latest` names is tried first, so that editing `latest` rolls a run back. A newer commit that
    was interrupted before it wrote `latest` goes before it. The others follow, the last commit first.

    Args:
        load: A directory of `global_stepN` directories, or such a directory itself.
        iteration: The only iteration that may be loaded; None for any.
        verify: Whether sha256 of every file is compared with the manifest. gpt-neox writes no manifest; the checksums
            inside its files are compared instead.
        way_out: What a user can do if there is no checkpoint, for the message.

    Raises:
        NoCheckpointError: If none is complete, with a reason for each.
        CheckpointError: If the only one that may be loaded is not complete.
    """
    load = Path(load)
    if not load.is_dir():
        raise CheckpointError(f"load: {load} is not a directory, and there is nothing to resume from; {way_out}")
    if is_checkpoint(load) and not checkpoint_directories(load):
        return _only(load, verify)
    if iteration is not None:
        return _only(_existing(load, iteration), verify)
    reasons: list[str] = []
    for path in _candidates(load):
        problems = _check_to_load(path, verify, reasons)
        if not problems:
            return path
        reasons.append(f"{path.name}: {'; '.join(problems)}")
        _log.warning("checkpoint %s is not complete: %s", path, "; ".join(problems))
    found = "\n  ".join(reasons) or "no global_stepN directories"
    raise NoCheckpointError(f"load: no complete checkpoint in {load}:\n  {found}\n{way_out}")


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
    if checkpoint_directories(path) or names_checkpoint(path):  # gpt-neox's converter of Llama names it `0`
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


def names_of_checkpoints(save: Path) -> str:
    """Return the names of all checkpoints in a directory, separated by commas."""
    return ", ".join(sorted(path.name for path in checkpoint_directories(save)))


def is_checkpoint(path: Path) -> bool:
    """Return whether a directory holds model files itself."""
    return any(_holds_weights(file.name) for file in path.iterdir())


def _holds_weights(name: str) -> bool:
    if parse_averaged_file(name) is not None:
        return True
    return parse_layer_file(name) is not None or parse_mp_rank_file(name) is not None


def why_incomplete(path: Path, *, hashes: bool = True) -> list[str]:
    """Return the reasons why a checkpoint must not be loaded; none if it is complete.

    Args:
        path: The checkpoint.
        hashes: Whether every byte is read and compared with hashes or checksums.
    """
    try:
        if read_manifest(path) is None:
            open_source(path)  # raises if a tensor rank's file is missing
        return _damage(path, lambda name: True, hashes=hashes)
    except CheckpointError as error:
        return [str(error)]


def damaged_weights(path: Path) -> list[str]:
    """Return what is wrong with the files of weights, which are read completely.

    It may run in a thread next to the one that converts the weights.
    """
    try:
        return _damage(path, _holds_weights, hashes=True)
    except CheckpointError as error:
        return [str(error)]


def _damage(path: Path, wanted: Callable[[str], bool], *, hashes: bool) -> list[str]:
    """Check some files of a checkpoint, and return what is wrong with them.

    Args:
        path: The checkpoint.
        wanted: Whether a file, given by name, is checked.
        hashes: Whether every byte is read and compared with hashes or checksums.
    """
    manifest = read_manifest(path)
    if manifest is None:
        archives = [file for file in sorted(path.glob("*.pt")) if wanted(file.name)]
        return _broken_archives(archives, hashes)
    files = {name: record for name, record in manifest.files.items() if wanted(name)}
    return check_manifest(path, replace(manifest, files=files), hashes=hashes)


def _broken_archives(files: list[Path], checksums: bool) -> list[str]:
    """Check files without a manifest, in threads, because checksums release the interpreter lock.

    Args:
        files: Files that `torch.save` has written.
        checksums: Whether every CRC-32 is checked, not only the structure of the zip file.
    """
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        problems = pool.map(lambda file: _broken_archive(file, checksums), files)
        return list(filter(None, problems))


def _broken_archive(file: Path, checksums: bool) -> str | None:
    """Return what is wrong with one file, or None."""
    try:
        with open(file, "rb") as stream:
            if stream.read(2) != b"PK":
                return None  # torch's format before 1.6 has no checksums
        with zipfile.ZipFile(file) as archive:
            bad = archive.testzip() if checksums else None
    except (OSError, zipfile.BadZipFile, EOFError, ValueError, RuntimeError, NotImplementedError) as error:
        return f"{file.name} is truncated or damaged ({error})"
    if bad is not None:
        return f"{file.name} is damaged (checksum of {bad})"
    return None


def _only(path: Path, verify: bool) -> Path:
    """Return a checkpoint that was chosen. Raises CheckpointError if it is not complete."""
    problems = _check_to_load(path, verify, [])
    if problems:
        raise CheckpointError(f"{path} is not complete: {'; '.join(problems)}")
    return path


def _existing(load: Path, iteration: int) -> Path:
    """Return the checkpoint of an iteration. Raises CheckpointError if there is none."""
    name = step_directory(iteration)
    for path in checkpoint_directories(load):
        if path.name.endswith(name):
            return path
    raise CheckpointError(
        f"iteration: {load / name} does not exist; {load} has: {names_of_checkpoints(load) or 'none'}"
    )


def _candidates(load: Path) -> list[Path]:
    """Return the checkpoints in the order in which to try them. Warn if `latest` does not name the first one."""
    named = _named_by_latest(load)
    by_commit = sorted(checkpoint_directories(load), key=_sequence, reverse=True)
    order = [path for path in by_commit if path != named]
    if named is not None:
        order.insert(0, named)
    pending = load / PENDING
    if pending.is_file():
        interrupted = load / pending.read_text(encoding="utf-8").strip()
        if interrupted in order and interrupted != named:
            _log.warning("the save of %s was interrupted before it wrote `latest`; trying it first", interrupted.name)
            order.remove(interrupted)
            order.insert(0, interrupted)
    elif named is not None and by_commit and _sequence(by_commit[0]) > _sequence(named):
        _log.warning("`latest` names %s, not the newer %s; `iteration` chooses another", named.name, by_commit[0].name)
    return order


def names_checkpoint(load: Path) -> bool:
    """Return whether `latest` names a checkpoint, which may have any name; not if what it names has been moved away."""
    return isinstance(_read_latest(load), Path)


def _named_by_latest(load: Path) -> Path | None:
    """Return the checkpoint that `latest` names. If it names none, warn and return None."""
    found = _read_latest(load)
    if isinstance(found, Path):
        return found
    _log.warning("%s %s; taking the newest complete checkpoint", load / LATEST, found)
    return None


def _read_latest(load: Path) -> Path | str:
    """Return the checkpoint that `latest` names, or why it names none."""
    try:
        tag = (load / LATEST).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return "is missing"
    except (OSError, UnicodeDecodeError) as error:
        return f"cannot be read ({error})"
    path = load / tag
    if tag and Path(tag).name == tag and path.is_dir():
        return path
    return f"names {tag!r}, which does not exist" if tag else "is empty"


def _sequence(path: Path) -> int:
    """Return the number of a checkpoint's commit; 0 without a manifest, or with a broken one."""
    try:
        manifest = read_manifest(path)
    except CheckpointError:
        return 0
    if manifest is None:
        return 0
    return manifest.sequence


def _check_to_load(path: Path, verify: bool, reasons: list[str]) -> list[str]:
    """Return the reasons why a checkpoint must not be loaded. If there are none, log that it is loaded.

    Args:
        path: The checkpoint.
        verify: Whether every byte is read and compared with hashes or checksums.
        reasons: Reasons why newer checkpoints are not loaded, for the log.
    """
    started = time.perf_counter()
    problems = why_incomplete(path, hashes=verify)
    seconds = max(time.perf_counter() - started, 1e-9)
    if problems:
        return problems
    checked = "sizes checked"
    if verify:
        megabytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) / 1e6
        checked = f"hashes of {megabytes:,.0f} MB checked, {megabytes / seconds:,.0f} MB/s"
    skipped = ""
    if reasons:
        skipped = f"; skipped {len(reasons)} newer: {' | '.join(reasons)}"
    _log.info("loading checkpoint %s (%s)%s", with_steps(path), checked, skipped)
    return []


def with_steps(path: Path) -> str:
    """Return a checkpoint's path and its number of steps, as far as its name tells it."""
    step = parse_step_directory(path.resolve().name)
    if step is None:
        return str(path)
    return f"{path}, {step:,} steps"


def keep_last(save: str | Path, count: int) -> list[Path]:
    """Delete all but the newest checkpoints of a run. One rank calls it.

    The checkpoint that `latest` names is never deleted. Nothing is deleted unless a kept checkpoint is complete (by the
    sizes of its files), so that a good one remains. A checkpoint that is protected (`kept_from_deletion`: it is
    being copied, or is the best one) stays until a later call.

    Args:
        save: Directory of the run's checkpoints.
        count: Number of checkpoints to keep, by iteration.

    Returns:
        The deleted directories.
    """
    save = Path(save)
    assert count >= 1, count
    directories = checkpoint_directories(save)
    latest = save / LATEST
    named = ""
    if latest.is_file():
        named = latest.read_text(encoding="utf-8").strip()
    old = list(directories[count:])
    if named and save / named in old:
        old.remove(save / named)
    if old and all(why_incomplete(path, hashes=False) for path in directories[:count]):
        _log.warning(
            "keep_last_n_checkpoints: none of the %d newest in %s is complete; nothing is deleted", count, save
        )
        return []
    deleted = []
    for path in old:
        if is_kept_from_deletion(path):
            _log.debug("%s stays: it is being copied, or is the best one", path)
            continue
        delete_checkpoint(path)
        deleted.append(path)
        _log.info("deleted old checkpoint %s", path)
    return deleted
