"""Checkpoints that `load` names by an address in object storage: fetched before anything is planned."""

from __future__ import annotations

from pathlib import Path

from neox.config import NeoXConfig
from neox.storage import is_remote


def with_local_load(config: NeoXConfig) -> NeoXConfig:
    """Return a configuration whose `load` is a local directory: an address is replaced by a copy of its checkpoint.

    Raises:
        CheckpointError: If the checkpoint cannot be fetched.
    """
    keys = config.checkpoint
    if keys.load is None or not is_remote(keys.load):
        return config
    from neox.checkpoint.mirror import fetch_checkpoint  # torch
    from neox.checkpoint.names import parse_step_directory

    found = fetch_checkpoint(keys.load, Path(keys.checkpoint_cache_dir), keys.iteration)
    return config.updated({"load": str(found.parent), "iteration": parse_step_directory(found.name)})
