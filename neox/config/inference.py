"""A training configuration as generation and evaluation read it: on any number of ranks, without training's batches."""

from __future__ import annotations

from neox.config.sections import NeoXConfig

# Keys that bind a configuration to the number of ranks it trains on.
_OF_TRAINING_RANKS = ("train_batch_size", "gradient_accumulation_steps")
_FROM_THE_COMMAND_LINE = "--set"


def for_inference(config: NeoXConfig) -> NeoXConfig:
    """Return the configuration without what only training's number of ranks makes true.

    `global_num_gpus` in a file counts the ranks of training; given on the command line it counts these.
    """
    flat = {key: value for key, value in config.to_flat().items() if key not in _OF_TRAINING_RANKS}
    if config.source("global_num_gpus") != _FROM_THE_COMMAND_LINE:
        flat.pop("global_num_gpus", None)
    flat.setdefault("train_micro_batch_size_per_gpu", 1)
    return NeoXConfig.from_flat(flat, config.sources())
