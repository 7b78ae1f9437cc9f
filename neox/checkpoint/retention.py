"""Deleting old checkpoints: `keep_last_n_checkpoints`."""

from __future__ import annotations

from pathlib import Path

from neox.checkpoint.finding import why_not_whole
from neox.checkpoint.names import LATEST
from neox.checkpoint.staging import checkpoint_directories, delete_checkpoint
from neox.log import get_logger

_log = get_logger(__name__)


def keep_last(save: str | Path, count: int) -> list[Path]:
    """Delete all but the `count` newest checkpoints (by iteration) and return the deleted paths; call on one rank.

    The one that `latest` names is never deleted, and nothing is deleted unless a kept one is whole (sizes, not hashes),
    so that the last good one survives.
    """
    save = Path(save)
    assert count >= 1, count
    directories = checkpoint_directories(save)
    kept, old = directories[:count], directories[count:]
    latest = save / LATEST
    named = latest.read_text(encoding="utf-8").strip() if latest.is_file() else ""
    doomed = [path for path in old if path.name != named]
    if doomed and not any(not why_not_whole(path, hashes=False) for path in kept):
        _log.warning("keep_last_n_checkpoints: none of the %d newest in %s is whole; deleting nothing", count, save)
        return []
    for path in doomed:
        delete_checkpoint(path)
        _log.info("deleted old checkpoint %s", path)
    return doomed
