"""Deletion of a run's old checkpoints (`keep_last_n_checkpoints`)."""

from __future__ import annotations

from pathlib import Path

from neox.checkpoint.save_directory.staging import delete_checkpoint, is_kept_from_deletion
from neox.checkpoint_files.contents import why_incomplete
from neox.checkpoint_files.finding import checkpoint_directories
from neox.checkpoint_files.names import LATEST
from neox.log import get_logger

_log = get_logger(__name__)


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
        if delete_checkpoint(path):
            deleted.append(path)
            _log.info("deleted old checkpoint %s", path)
    return deleted
