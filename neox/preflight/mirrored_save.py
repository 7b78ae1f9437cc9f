"""The newest checkpoint of a run in `checkpoint_mirror`, from which a start on new hosts resumes, and its identity."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from neox.checkpoint_files.finding import checkpoint_directories, step_of
from neox.config import NeoXConfig
from neox.errors import CheckpointError, ConfigError
from neox.log import get_logger
from neox.plan.run_identity import RUN_FILE, find_run, found_run, other_run_message
from neox.plan.run_start import requested_start
from neox.preflight.data_decisions import DecidedConfig
from neox.storage import shown

if TYPE_CHECKING:
    from neox.checkpoint.remote.fetching import RemoteCheckpoint

_log = get_logger(__name__)
_IDENTITY_FILES = (RUN_FILE, "configs/config.yml")


def restore_save(config: NeoXConfig) -> None:
    """Fetch the newest checkpoint of the run in `checkpoint_mirror` into `save`, unless `save` has one as new.

    Args:
        config: The configuration of a training.

    Raises:
        CheckpointError: If the mirror cannot be read, and `save` holds nothing to resume from; or files are damaged.
        ConfigError: If the checkpoint is of another run.
    """
    newest = _newer_in_mirror(config)
    if newest is None:
        return
    refused = _other_run(config, newest)
    if refused is not None:
        raise ConfigError([config.problem_about(refused, "save", "checkpoint_mirror")])
    from neox.checkpoint.remote.fetching import fetch_checkpoint  # torch

    fetch_checkpoint(newest, Path(str(config.checkpoint.save)))


def planned_restore(config: NeoXConfig) -> DecidedConfig:
    """Return what `restore_save` will do, without fetching more than the identity of the run."""
    keys = config.checkpoint
    try:
        newest = _newer_in_mirror(config)
        if newest is None:
            return DecidedConfig(config)
        refused = _other_run(config, newest)
        size = sum(record.size for record in newest.manifest().files.values())
    except CheckpointError as error:
        return DecidedConfig(config, problems=(config.problem_about(str(error), "checkpoint_mirror"),))
    if refused is not None:
        return DecidedConfig(config, problems=(config.problem_about(refused, "save", "checkpoint_mirror"),))
    what = f"{shown(newest.mirror.address)}/{newest.name}, {size:,} bytes,"
    note = f"save: {what} is of this run: it is fetched to {keys.save} at the start and resumed"
    source = config.source("save").derived("load")
    dropped = ["finetune"]
    if not requested_start(config).iteration_of_save:
        dropped.append("iteration")
    resumed = config.updated({"load": keys.save}, without=dropped, source=source)
    return DecidedConfig(resumed, (note,))


def _newer_in_mirror(config: NeoXConfig) -> RemoteCheckpoint | None:
    """Return the newest complete checkpoint of the mirror if it is newer than those in `save`; else None.

    If the mirror cannot be read, a run that has a checkpoint in `save` resumes from that, which is logged.

    Raises:
        CheckpointError: If the mirror cannot be read, and `save` holds no checkpoint.
    """
    keys = config.checkpoint
    asked = requested_start(config)
    if keys.save is None or keys.checkpoint_mirror is None or asked.replaces_save:
        return None
    from neox.checkpoint.remote.fetching import RemoteCheckpoint
    from neox.checkpoint.remote.mirror import Mirror

    save = Path(keys.save)
    local = [0, *(step_of(path) or 0 for path in checkpoint_directories(save))]
    mirror = Mirror(keys.checkpoint_mirror)
    try:
        complete = mirror.iterations()
    except CheckpointError as error:
        found = find_run(save)
        if found is None:
            raise CheckpointError(f"{error}. Nothing was started, because it may hold this run") from error
        _log.warning("checkpoint_mirror: %s; this start resumes from %s", error, found.checkpoint)
        return None
    if asked.iteration is not None and asked.iteration_of_save:
        if asked.iteration in local or asked.iteration not in complete:
            return None
        return RemoteCheckpoint(mirror, asked.iteration)
    newest = max(complete, default=-1)
    if newest < max(local) or (newest == max(local) and find_run(save) is not None):
        return None
    return RemoteCheckpoint(mirror, newest)


def _other_run(config: NeoXConfig, newest: RemoteCheckpoint) -> str | None:
    """Return why a run must not resume from a checkpoint of its mirror, which is another one's; None if it is its own.

    Raises:
        CheckpointError: If the mirror cannot be read.
    """
    if requested_start(config).own_directory:
        return None
    records = newest.manifest().files
    address = shown(newest.mirror.address)
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory) / newest.name
        for name in _IDENTITY_FILES:
            if name in records:
                newest.mirror.download(newest.iteration, name, copy / name, records[name])
        found = found_run(copy, newest.iteration)
        if found.is_run_of(config):
            return None
        return other_run_message(config, found, address)
