"""Writing a checkpoint so that it is either whole or absent: beside first, then hashed, renamed, and named in `latest`.

Order of one save, over all ranks of a run:

1. rank 0: `stage_directory`, then a barrier;
2. every rank writes its files into `staging_path` and says whether it could; all agree (an all-reduce);
3. rank 0: `commit`, or `discard` when any rank failed.

Killed at any point, the directory holds the earlier checkpoints untouched, and what was half written is under a name
that starts with a dot, which loading ignores and the next save removes.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from neox.checkpoint.manifest import FileRecord, read_manifest, write_manifest
from neox.checkpoint.names import LATEST, parse_step_directory, step_directory
from neox.errors import CheckpointError
from neox.files import fsync_path, write_text
from neox.log import get_logger

_log = get_logger(__name__)
_STAGED, _REPLACED, _DELETED = ".staging-", ".replaced-", ".deleted-"
PENDING = ".latest-pending"


def staging_path(save: str | Path, iteration: int) -> Path:
    """Where an iteration's files are written before they are committed; pure, the same on every rank."""
    return Path(save) / f"{_STAGED}{step_directory(iteration)}"


def stage_directory(save: str | Path, iteration: int) -> Path:
    """Make an empty directory to write a checkpoint into, removing what interrupted saves left; call on one rank.

    Raises CheckpointError when the directory cannot be written.
    """
    save = Path(save)
    path = staging_path(save, iteration)
    try:
        save.mkdir(parents=True, exist_ok=True)
        _recover_replaced(save)
        for leftover in save.iterdir():
            if leftover.name.startswith((_STAGED, _DELETED)):
                _log.info("removing what an interrupted save left: %s", leftover)
                shutil.rmtree(leftover)
        path.mkdir()
    except OSError as error:
        raise CheckpointError(
            f"save: {save} cannot be written: {error.strerror or error} ({error.filename}); "
            "free space, fix its permissions, or choose another `save` directory"
        ) from error
    return path


def discard(staged: Path) -> None:
    """Remove a staging directory after a failed save; a second failure is only logged, the save has failed already."""
    try:
        shutil.rmtree(staged)
    except OSError as error:
        _log.warning("could not remove %s: %s", staged, error)


def commit(staged: Path, records: Mapping[str, FileRecord] | None = None) -> Path:
    """Make a staged checkpoint final: fsync, manifest, rename, then `latest`; return its path. Call on one rank.

    records: what `record_share` found on other ranks, so that this one need not hash everything. An earlier checkpoint
    of the same iteration is replaced. Raises CheckpointError when the disk refuses; the earlier checkpoints and
    `latest` are then as before, and what was staged is gone.
    """
    save = staged.parent
    name = staged.name.removeprefix(_STAGED)
    iteration = parse_step_directory(name)
    assert iteration is not None, staged
    assert staged.name.startswith(_STAGED), staged
    final = save / name
    try:
        write_manifest(staged, iteration, _next_sequence(save), records)
        fsync_path(staged)
        write_text(save / PENDING, name)
        replaced = save / f"{_REPLACED}{name}"
        if final.exists():
            os.rename(final, replaced)
        os.rename(staged, final)
        fsync_path(save)
        write_text(save / LATEST, name)
        (save / PENDING).unlink(missing_ok=True)
        shutil.rmtree(replaced, ignore_errors=True)
    except OSError as error:
        if staged.exists():
            _undo(staged)
        raise CheckpointError(f"{final}: not committed: {error.strerror or error} ({error.filename})") from error
    return final


def _undo(staged: Path) -> None:
    """Take back a commit that failed before its rename."""
    discard(staged)
    try:
        (staged.parent / PENDING).unlink(missing_ok=True)
        _recover_replaced(staged.parent)
    except OSError as error:
        _log.warning("after a failed commit: %s", error)


def delete_checkpoint(path: Path) -> None:
    """Delete a checkpoint; killed halfway, what is left has a name that loading ignores. Raises CheckpointError."""
    doomed = path.with_name(f"{_DELETED}{path.name}")
    try:
        os.rename(path, doomed)
        shutil.rmtree(doomed)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be deleted: {error.strerror or error}") from error


def checkpoint_directories(save: Path) -> list[Path]:
    """The `global_stepN` directories, newest iteration first.

    A save of the same iteration that was killed between its two renames has left the earlier one under another name.
    """
    found: dict[int, Path] = {}
    for path in save.iterdir():
        step = parse_step_directory(path.name.removeprefix(_REPLACED))
        if step is not None and path.is_dir() and (step not in found or found[step].name.startswith(_REPLACED)):
            found[step] = path
    return [found[step] for step in sorted(found, reverse=True)]


def _recover_replaced(save: Path) -> None:
    """Finish or undo a replacement that was killed between its two renames."""
    for replaced in [p for p in save.iterdir() if p.name.startswith(_REPLACED)]:
        final = save / replaced.name.removeprefix(_REPLACED)
        if final.exists():
            shutil.rmtree(replaced)
        else:
            os.rename(replaced, final)


def _next_sequence(save: Path) -> int:
    sequences = [0]
    for path in checkpoint_directories(save):
        try:
            manifest = read_manifest(path)
        except CheckpointError:
            continue  # a broken manifest is reported when loading; here only the counter matters
        sequences.append(manifest.sequence if manifest else 0)
    return max(sequences) + 1
