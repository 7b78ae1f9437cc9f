"""The model that generation, evaluation and export read: the one that a configuration's run has trained."""

from __future__ import annotations

from pathlib import Path

from neox.config.neox_config import NeoXConfig
from neox.plan.devices.precision import Precision
from neox.plan.rules import static_problems
from neox.plan.run_identity import FoundRun, find_run
from neox.plan.run_start import StartMode, requested_start


def with_trained_model(config: NeoXConfig) -> NeoXConfig:
    """Return a training configuration whose `load` names what the run has trained.

    In fine-tuning, `load` names the weights that the run starts from. Then `save` takes its place as soon as it holds a
    checkpoint, unless only `load` is given on the command line. So it does if the run in `save` continues the one in
    `load`. In other runs `load` stays as it is. If `save` holds nothing on this machine, `checkpoint_mirror` takes its
    place.
    """
    keys = config.checkpoint
    if keys.save is None:
        return config
    trained = keys.save
    key = "save"
    own = find_run(Path(keys.save))
    if own is None:
        if keys.checkpoint_mirror is None:
            return config
        trained = keys.checkpoint_mirror
        key = "checkpoint_mirror"
    if requested_start(config).mode is not StartMode.FINETUNE and not _continues(config, own):
        if keys.load is None and key == "checkpoint_mirror":
            return config.updated({"load": trained}, source=config.source(key).derived(key))
        return config
    if config.source("load").is_command_line and not config.source("save").is_command_line:
        return config
    without = ["finetune"]
    if not config.source("iteration").is_command_line:
        without.append("iteration")  # of the start
    if not config.source("load_weights").is_command_line:
        without.append("load_weights")  # of the start
    return config.updated({"load": trained}, without=without, source=config.source(key).derived(key))


def _continues(config: NeoXConfig, own: FoundRun | None) -> bool:
    """Return whether the run in `save` began with the checkpoint of another one, which `load` names."""
    asked = requested_start(config)
    if asked.load is None or own is None or asked.own_directory:
        return False
    if static_problems(config):  # they are reported where the model is planned
        return False
    return own.is_run_of(config)


def model_directory(config: NeoXConfig) -> str | None:
    """Return the directory or address of the trained model: `load`, else `save`; None if neither is given.

    It is that of a checkpoint if `iteration` names one, else one that holds checkpoints.
    """
    keys = with_trained_model(config).checkpoint
    directory = keys.load or keys.save
    if directory is None or keys.iteration is None:
        return directory
    return f"{directory.rstrip('/')}/global_step{keys.iteration}"


def saved_precision(config: NeoXConfig) -> Precision | None:
    """Return the precision of the checkpoint that a run reads which does not train: of `load`, else of `save`.

    None if there is no checkpoint, or another program wrote it.
    """
    keys = config.checkpoint
    directory = keys.load or keys.save
    found = None if directory is None else find_run(Path(directory), keys.iteration)
    return None if found is None else found.precision
