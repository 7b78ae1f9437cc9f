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
from neox.checkpoint.names import LATEST, parse_layer_file, parse_mp_rank_file, step_directory
from neox.checkpoint.staging import PENDING, checkpoint_directories, delete_checkpoint
from neox.checkpoint.weight_files import open_source
from neox.errors import CheckpointError, ConfigError
from neox.log import get_logger

_log = get_logger(__name__)


def find_checkpoint(
    load: str | Path,
    iteration: int | None = None,
    *,
    verify: bool = True,
    way_out: str = "remove `load` to start from scratch",
) -> Path:
    """Return the checkpoint directory to load, and log the choice and its reason.

    The one that `latest` names is tried first (so an edited `latest` rolls a run back), unless a newer commit was
    interrupted before it could write `latest`; then the others, latest commit first.

    Args:
        load: A directory of `global_stepN` directories, or such a directory itself.
        iteration: Exactly this one is loaded.
        verify: Compare sha256 of every file with the manifest (without a manifest, as gpt-neox writes checkpoints: the
            checksums inside the files).
        way_out: What a user can do if there is none, for the message.

    Raises:
        CheckpointError: If none is complete, with a reason for each.
    """
    load = Path(load)
    if not load.is_dir():
        raise CheckpointError(f"load: {load} is not a directory, and there is nothing to resume from; {way_out}")
    if is_checkpoint(load) and not checkpoint_directories(load):
        return _only(load, verify)
    if iteration is not None:
        return _only(_existing(load, iteration), verify)
    candidates, notes = _candidates(load)
    for note in notes:
        _log.warning("%s", note)
    reasons: list[str] = []
    for path in candidates:
        problems = why_incomplete(path, hashes=verify)
        if not problems:
            _log_choice(path, reasons, verify)
            return path
        reasons.append(f"{path.name}: {'; '.join(problems)}")
        _log.warning("checkpoint %s is not complete: %s", path, "; ".join(problems))
    found = "\n  ".join(reasons) if reasons else "no global_stepN directories"
    raise CheckpointError(f"load: no complete checkpoint in {load}:\n  {found}\n{way_out}")


def checkpoint_at(path: Path) -> Path:
    """Return the checkpoint that a tool is given: the directory itself, or the newest complete one in it.

    Raises:
        ConfigError: If the directory is no checkpoint and has none.
        CheckpointError: If none in it is complete.
    """
    if path.is_dir():
        if is_checkpoint(path):
            return path
        if checkpoint_directories(path):
            return find_checkpoint(path, verify=False, way_out="give another directory")
    what = "has no model files and no global_stepN directories" if path.is_dir() else "is not a directory"
    beside = [] if path.is_dir() or not path.parent.is_dir() else checkpoint_directories(path.parent)
    there = f" ({path.parent} has {', '.join(sorted(p.name for p in beside))})" if beside else ""
    raise ConfigError(f"{path} {what}{there}; give the global_stepN directory of a NeoX checkpoint")


def is_checkpoint(path: Path) -> bool:
    """Return whether a directory holds model files itself."""
    return any(_holds_weights(p.name) for p in path.iterdir())


def _holds_weights(name: str) -> bool:
    return parse_layer_file(name) is not None or parse_mp_rank_file(name) is not None


def why_incomplete(path: Path, *, hashes: bool = True) -> list[str]:
    """Return the reasons why a checkpoint must not be loaded; empty if it is complete."""
    try:
        if read_manifest(path) is None:
            open_source(path)  # complete over tensor ranks?
        return _damage(path, lambda name: True, hashes=hashes)
    except CheckpointError as error:
        return [str(error)]


def damaged_weights(path: Path) -> list[str]:
    """Return the damage of the files of weights, which are read completely.

    Meant for a thread beside the one that converts them.
    """
    try:
        return _damage(path, _holds_weights, hashes=True)
    except CheckpointError as error:
        return [str(error)]


def _damage(path: Path, wanted: Callable[[str], bool], *, hashes: bool) -> list[str]:
    """Compare the wanted files with the manifest, or without one with their own checksums."""
    manifest = read_manifest(path)
    if manifest is None:
        return _broken_archives([file for file in sorted(path.glob("*.pt")) if wanted(file.name)], hashes)
    files = {name: record for name, record in manifest.files.items() if wanted(name)}
    started = time.perf_counter()
    problems = check_manifest(path, replace(manifest, files=files), hashes=hashes)
    if hashes and not problems:
        size, seconds = sum(r.size for r in files.values()) / 1e6, time.perf_counter() - started
        _log.info("checked the hashes of %s: %.0f MB, %.0f MB/s", path, size, size / max(seconds, 1e-9))
    return problems


def _broken_archives(files: list[Path], checksums: bool) -> list[str]:
    """Check the zip structure (and with `checksums` every CRC-32) of files without a manifest."""
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:  # checksums release the interpreter lock
        return [problem for problem in pool.map(lambda file: _broken_archive(file, checksums), files) if problem]


def _broken_archive(file: Path, checksums: bool) -> str | None:
    try:
        with open(file, "rb") as stream:
            if stream.read(2) != b"PK":
                return None  # torch's format before 1.6 has no checksums
        with zipfile.ZipFile(file) as archive:
            bad = archive.testzip() if checksums else None
    except (OSError, zipfile.BadZipFile, EOFError, ValueError, RuntimeError, NotImplementedError) as error:
        return f"{file.name} is truncated or damaged ({error})"
    return None if bad is None else f"{file.name} is damaged (checksum of {bad})"


def _only(path: Path, verify: bool) -> Path:
    if problems := why_incomplete(path, hashes=verify):
        raise CheckpointError(f"{path} is not complete: {'; '.join(problems)}")
    _log_choice(path, [], verify)
    return path


def _existing(load: Path, iteration: int) -> Path:
    there = checkpoint_directories(load)
    name = step_directory(iteration)
    if found := [path for path in there if path.name.endswith(name)]:
        return found[0]
    names = ", ".join(path.name for path in there) or "none"
    raise CheckpointError(f"iteration: {load / name} does not exist; {load} has: {names}")


def _candidates(load: Path) -> tuple[list[Path], list[str]]:
    """Return the checkpoints in the order to try them, and notes about `latest`."""
    named, notes = _read_latest(load)
    order = sorted(checkpoint_directories(load), key=_sequence, reverse=True)
    first = [named] if named is not None else []
    pending = load / PENDING
    if pending.is_file():
        interrupted = load / pending.read_text(encoding="utf-8").strip()
        if interrupted in order and interrupted != named:
            notes.append(f"the save of {interrupted.name} was interrupted before `latest` was written; trying it first")
            first.insert(0, interrupted)
    elif named is not None and order and _sequence(order[0]) > _sequence(named):
        notes.append(f"`latest` names {named.name}, not the newer {order[0].name}; `iteration` chooses another")
    return [*first, *(path for path in order if path not in first)], notes


def _read_latest(load: Path) -> tuple[Path | None, list[str]]:
    latest = load / LATEST
    try:
        tag = latest.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None, [f"{latest} is missing; taking the newest complete checkpoint"]
    except (OSError, UnicodeDecodeError) as error:
        return None, [f"{latest} cannot be read ({error}); taking the newest complete checkpoint"]
    if not tag:
        return None, [f"{latest} is empty; taking the newest complete checkpoint"]
    path = load / tag
    if Path(tag).name != tag or not path.is_dir():
        return None, [f"{latest} names {tag!r}, which does not exist; taking the newest complete checkpoint"]
    return path, []


def _sequence(path: Path) -> int:
    try:
        manifest = read_manifest(path)
    except CheckpointError:
        return 0
    return manifest.sequence if manifest else 0


def _log_choice(path: Path, reasons: list[str], verify: bool) -> None:
    checked = "hashes checked" if verify else "sizes checked"
    skipped = f"; skipped {len(reasons)} newer: {' | '.join(reasons)}" if reasons else ""
    _log.info("loading checkpoint %s (%s)%s", path, checked, skipped)


def keep_last(save: str | Path, count: int) -> list[Path]:
    """Delete all but the newest checkpoints of a run; call on one rank.

    The one that `latest` names is never deleted, and nothing is deleted unless a kept one is complete (by sizes, not
    hashes), so that the last good one remains.

    Args:
        save: Directory of the run's checkpoints.
        count: Number of checkpoints to keep, by iteration.

    Returns:
        The deleted directories.
    """
    save = Path(save)
    assert count >= 1, count
    directories = checkpoint_directories(save)
    kept = directories[:count]
    latest = save / LATEST
    named = latest.read_text(encoding="utf-8").strip() if latest.is_file() else ""
    old = [path for path in directories[count:] if path.name != named]
    if old and not any(not why_incomplete(path, hashes=False) for path in kept):
        _log.warning(
            "keep_last_n_checkpoints: none of the %d newest in %s is complete; nothing is deleted", count, save
        )
        return []
    for path in old:
        delete_checkpoint(path)
        _log.info("deleted old checkpoint %s", path)
    return old
