"""Atomic saves: a checkpoint is written to a staging directory, hashed, renamed, and named in `latest`.

Order of one save, over all ranks of a run:

1. rank 0: `stage_directory`, then a barrier;
2. every rank writes its files into `staging_path`, and all ranks learn whether all could;
3. rank 0: `commit`, or `discard` when any rank failed.

If a run is killed at any point, the earlier checkpoints are unchanged. Names of incomplete files start with a dot.
Loading ignores them, and the next save removes them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from neox.checkpoint_files.finding import checkpoint_directories
from neox.checkpoint_files.manifest import FileRecord, read_manifest, write_manifest
from neox.checkpoint_files.names import LATEST, MANIFEST, PENDING, REPLACED, parse_step_directory, step_directory
from neox.errors import CheckpointError
from neox.files import fsync_path, lock_file, lock_file_shared, write_text
from neox.launch.run_lock import training_in
from neox.log import get_logger

_log = get_logger(__name__)
_STAGED = ".staging-"
_DELETED = ".deleted-"


def staging_path(save: str | Path, iteration: int) -> Path:
    """Return the directory into which an iteration's files are written before they are committed."""
    return Path(save) / f"{_STAGED}{step_directory(iteration)}"


def stage_directory(save: str | Path, iteration: int) -> Path:
    """Create an empty staging directory, and remove what interrupted saves left. One rank calls it.

    The staging directory of a save that is still being written looks like that of an interrupted one, so each save
    into a directory ends before the next begins: a background save is waited for, and tools leave the directory of a
    training alone (`refuse_running`).

    Raises:
        CheckpointError: If the directory cannot be written.
    """
    save = Path(save)
    path = staging_path(save, iteration)
    try:
        save.mkdir(parents=True, exist_ok=True)
        recover_replaced(save)
        for leftover in sorted(save.iterdir()):
            if leftover.name.startswith((_STAGED, _DELETED)):
                _log.info("removing incomplete files of an interrupted save: %s", leftover)
                _remove_leftover(leftover)
        path.mkdir()
    except OSError as error:
        raise CheckpointError(
            f"save: {save} cannot be written: {error.strerror or error} ({error.filename}); "
            "free space, fix its permissions, or choose another `save` directory"
        ) from error
    return path


def refuse_running(save: Path) -> None:
    """Refuse to write a checkpoint into the directory of a training that runs. Tools call it before `stage_directory`.

    Raises:
        CheckpointError: If a training has locked the directory.
    """
    training = training_in(save)
    if training is not None:
        raise CheckpointError(f"{save} is in use by {training}: choose another directory, or wait until it has ended")


def discard(staged: Path) -> None:
    """Remove a staging directory after a failed save. A failure of the removal is only logged."""
    _remove_leftover(staged)


def commit(staged: Path, records: Mapping[str, FileRecord] | None = None) -> Path:
    """Make a staged checkpoint final. One rank calls it.

        .staging-global_stepN              global_stepN        latest
        files
        files, manifest                    (an earlier one)    an earlier one
                                           files, manifest     an earlier one, and PENDING names the new one
                                           files, manifest     global_stepN

    The second rename is the point of no return: before it, a failure takes everything back; after it, the checkpoint
    is complete and stays, and a start finds it by `PENDING`. An earlier checkpoint of the same iteration is replaced.

    Args:
        staged: The staging directory.
        records: Results of `record_share` on all ranks, so that this rank need not hash all files.

    Returns:
        The checkpoint's directory.

    Raises:
        CheckpointError: If writing fails. The message says whether the checkpoint was saved all the same, and only
            `latest` does not name it. If not, earlier checkpoints and `latest` are unchanged, and the staging directory
            is removed.
    """
    save = staged.parent
    name = staged.name.removeprefix(_STAGED)
    iteration = parse_step_directory(name)
    assert iteration is not None, staged
    assert staged.name.startswith(_STAGED), staged
    final = save / name
    pending = save / PENDING
    replaced = save / f"{REPLACED}{name}"
    if final.exists() and replaced.exists():
        _remove_leftover(replaced)
    try:
        write_manifest(staged, iteration, _next_sequence(save), records)
        fsync_path(staged)
        write_text(pending, name)
        if final.exists():
            os.rename(final, replaced)
        os.rename(staged, final)
    except OSError as error:
        _undo(staged)
        raise CheckpointError(
            f"{final}: could not be committed: {error.strerror or error} ({error.filename})"
        ) from error
    try:
        fsync_path(save)
        write_text(save / LATEST, name)
        pending.unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"{final}: is saved, but {save / LATEST} does not name it: {error.strerror or error} ({error.filename}); "
            "a start of this program finds it"
        ) from error
    if replaced.exists():
        _remove_leftover(replaced)
    return final


def _undo(staged: Path) -> None:
    """Revert a commit that failed before the staging directory was renamed."""
    discard(staged)
    try:
        (staged.parent / PENDING).unlink(missing_ok=True)
        recover_replaced(staged.parent)
    except OSError as error:
        _log.warning("after a failed commit: %s", error)


def delete_checkpoint(path: Path) -> bool:
    """Delete a checkpoint. If this is interrupted, the rest has a name that loading ignores.

    A training does not end because an old checkpoint cannot be deleted, such as a mount point, or one with a file that
    is open on a network file system. That is a warning.

    Returns:
        Whether the checkpoint no longer counts as one of the directory.
    """
    if path.is_symlink():  # somebody has moved it elsewhere
        _log.warning("%s stays: it is a link to %s; delete both to free the space", path, path.resolve())
        return False
    renamed = _free_name(path.with_name(f"{_DELETED}{path.name}"))
    try:
        os.rename(path, renamed)
    except OSError as error:
        _log.warning("%s cannot be deleted, and stays: %s; delete it by hand to free the space", path, error.strerror)
        return False
    _remove_leftover(renamed)
    return True


def _remove_leftover(path: Path) -> None:
    """Remove a directory that is no checkpoint. If that fails, rename it so that no save needs its name, and warn."""
    try:
        if path.is_symlink():
            path.unlink()  # not what it leads to
        else:
            shutil.rmtree(path)
    except OSError as error:
        aside = path
        if not path.name.startswith(_DELETED):
            aside = _free_name(path.with_name(f"{_DELETED}{path.name.lstrip('.')}"))
            with suppress(OSError):
                os.rename(path, aside)
        _log.warning("%s cannot be removed completely: %s; delete it by hand to free the space", aside, error)


def _free_name(path: Path) -> Path:
    """Return a path, with a number if it is taken."""
    free = path
    number = 2
    while os.path.lexists(free):
        free = path.with_name(f"{path.name}.{number}")
        number += 1
    return free


@contextmanager
def kept_from_deletion(path: Path) -> Iterator[None]:
    """Protect a checkpoint from `keep_last` inside a `with` block. Raises OSError if it has no manifest."""
    with open(path / MANIFEST, "r+b") as file:  # network file systems only lock files that are open for writing
        lock_file_shared(file)  # several may protect one
        yield


def is_kept_from_deletion(path: Path) -> bool:
    """Return whether this or another process protects a checkpoint with `kept_from_deletion`."""
    try:
        with open(path / MANIFEST, "r+b") as file:
            lock_file(file, wait=False)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def recover_replaced(save: Path) -> None:
    """Finish or undo the replacement of a checkpoint that was killed between its two renames. One rank calls it.

    Args:
        save: Directory of the run's checkpoints.

    Raises:
        OSError: If a rename fails.
    """
    for replaced in list(save.glob(f"{REPLACED}*")):
        final = save / replaced.name.removeprefix(REPLACED)
        if final.exists():
            _remove_leftover(replaced)
        else:
            os.rename(replaced, final)


def _next_sequence(save: Path) -> int:
    """Return the number of the next commit."""
    sequences = [0]
    for path in checkpoint_directories(save):
        try:
            manifest = read_manifest(path)
        except CheckpointError:
            continue  # reported when loading; only the counter matters here
        if manifest is not None:
            sequences.append(manifest.sequence)
    return max(sequences) + 1
