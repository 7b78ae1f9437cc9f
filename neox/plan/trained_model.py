"""The model that generation, evaluation and export read: the one that a configuration's run has trained."""

from __future__ import annotations

from pathlib import Path

from neox.config.neox_config import NeoXConfig
from neox.plan.run_identity import find_run


def with_trained_model(config: NeoXConfig) -> NeoXConfig:
    """Return a training configuration whose `load` names what the run has trained.

    In fine-tuning, `load` names the weights that the run starts from. Then `save` takes its place as soon as it holds a
    checkpoint, unless only `load` is given on the command line. In other runs `load` stays as it is.
    """
    keys = config.checkpoint
    if not keys.finetune or keys.save is None or find_run(Path(keys.save)) is None:
        return config
    if config.source("load").is_command_line and not config.source("save").is_command_line:
        return config
    without = ["finetune"]
    if not config.source("iteration").is_command_line:
        without.append("iteration")  # of the start
    if not config.source("load_weights").is_command_line:
        without.append("load_weights")  # of the start
    return config.updated({"load": keys.save}, without=without, source=config.source("save").derived("save"))


def model_directory(config: NeoXConfig) -> str | None:
    """Return the directory or address of the trained model: `load`, else `save`; None if neither is given."""
    keys = with_trained_model(config).checkpoint
    return keys.load or keys.save
