"""The model that generation, evaluation and export read: the one that a configuration's run has trained."""

from __future__ import annotations

from pathlib import Path

from neox.config.neox_config import NeoXConfig
from neox.plan.rules import static_problems
from neox.plan.run_identity import FoundRun, find_run, resumes_own_directory


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
    if not keys.finetune and not _continues(config, own):
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
    if config.checkpoint.load is None or own is None or resumes_own_directory(config):
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
