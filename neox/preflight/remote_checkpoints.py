"""Checkpoints that `load` names by an address in object storage: fetched, or for a dry run only looked at."""

from __future__ import annotations

from neox.config import NeoXConfig
from neox.decisions.checkpoint import choose_checkpoint
from neox.errors import CheckpointError
from neox.preflight.data_decisions import DecidedConfig
from neox.preflight.mirrored_save import planned_restore, restore_save
from neox.storage import cache_folder, is_remote, shown


def with_local_load(config: NeoXConfig, *, trains: bool) -> NeoXConfig:
    """Return a configuration whose `load` is a local directory: an address is replaced by a copy of its checkpoint.

    A training whose `checkpoint_mirror` holds a newer checkpoint of it than `save` gets that one first.

    Args:
        config: The configuration.
        trains: Whether optimizer states may be needed.

    Raises:
        CheckpointError: If the checkpoint cannot be fetched.
        ConfigError: If the mirror holds another run.
    """
    if trains and not _is_own_mirror(config):
        restore_save(config)
    if not _is_remote(config):
        return config
    if trains and choose_checkpoint(config).start.own_directory:
        return config  # `save` holds this run, and is resumed
    from neox.checkpoint.remote.fetching import with_local_load  # torch

    return with_local_load(config, trains=trains)


def planned_load(config: NeoXConfig, *, trains: bool) -> DecidedConfig:
    """Return what `with_local_load` will do, without fetching anything.

    A complete copy takes the place of the address. Otherwise `load` stays, and a note says what a start fetches.

    Args:
        config: The configuration.
        trains: Whether optimizer states may be needed.
    """
    if trains and not _is_own_mirror(config):
        restored = planned_restore(config)
        if restored.notes or restored.problems:
            return restored
    if not _is_remote(config) or (trains and choose_checkpoint(config).start.own_directory):
        return DecidedConfig(config)
    from neox.checkpoint.remote import fetching  # torch

    keys = config.checkpoint
    address = str(keys.load)
    if trains and fetching.returns_to_save(config):
        local = config.updated({"load": keys.save}, source=config.source("save").derived("load"))
        return DecidedConfig(local, (f"load: the newest checkpoint of {shown(address)}, if any, goes to {keys.save}",))
    try:
        remote = fetching.find_remote(address, keys.iteration)
        whole = remote.manifest()
    except CheckpointError as error:
        return DecidedConfig(config, problems=(config.problem_about(str(error), "load"),))
    directory = cache_folder(remote.mirror.address, keys.checkpoint_cache_dir)
    needed = fetching.needed_files(config, trains=trains)
    if fetching.has_copy(directory / remote.name, whole, needed):
        return DecidedConfig(config.updated(fetching.local_keys(address, directory)))
    sizes = [record.size for name, record in whole.files.items() if needed(name)]
    what = f"{shown(remote.mirror.address)}/{remote.name}, {sum(sizes):,} bytes in {len(sizes)} files,"
    note = f"load: {what} is fetched to {directory} at the start"
    if trains:
        note += "; each host fetches what its ranks read"
    return DecidedConfig(config, (note,))


def _is_own_mirror(config: NeoXConfig) -> bool:
    """Return whether `load` is the run's own mirror, which says that its checkpoints are to be resumed."""
    if not _is_remote(config):
        return False
    from neox.checkpoint.remote.fetching import returns_to_save  # torch

    return returns_to_save(config)


def _is_remote(config: NeoXConfig) -> bool:
    return config.checkpoint.load is not None and is_remote(config.checkpoint.load)
