"""Settings that the training data decides on the launcher: the length of a run in passes, the divisor of losses."""

from __future__ import annotations

from dataclasses import dataclass

from neox.config import NeoXConfig
from neox.errors import DataError
from neox.plan.batches.batch import solve_batch
from neox.plan.batches.batch_schedule import BatchSchedule, ramp_problems
from neox.plan.ranks.topology import solve_grid
from neox.problems import Problem

_EPOCHS = "num_train_epochs"
_NORMALIZATION = "loss_normalization"


@dataclass(frozen=True)
class DecidedConfig:
    """A configuration with settings that were decided by what is on disk.

    Attributes:
        config: The configuration; the given one if there was nothing to decide.
        notes: Notes on what was decided.
        problems: Why something cannot be decided.
    """

    config: NeoXConfig
    notes: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()


def decide_by_data(config: NeoXConfig, world_size: int) -> DecidedConfig:
    """Decide every setting that depends on the training data.

    Args:
        config: The configuration.
        world_size: Number of ranks, which determines the samples of a step.
    """
    counted = with_train_iters(config, world_size)
    decided = with_loss_normalization(counted.config)
    return DecidedConfig(decided.config, (*counted.notes, *decided.notes), counted.problems)


def with_train_iters(config: NeoXConfig, world_size: int) -> DecidedConfig:
    """Count the iterations of `num_train_epochs` in the training data.

    Nothing is counted if the batch or the lengths break rules, which `resolve` reports.

    Args:
        config: The configuration.
        world_size: Number of ranks, which determines the samples of a step.
    """
    epochs = config.training.num_train_epochs
    length = config.model.seq_length
    if epochs is None or length is None or config.training.train_iters is not None or config.data.data_stages:
        return DecidedConfig(config)
    grid = solve_grid(config, world_size, [])
    if grid is None:
        return DecidedConfig(config)
    batch = solve_batch(config, grid.data_size, [])
    if batch is None or any(ramp_problems(config, batch)):
        return DecidedConfig(config)
    try:
        samples = _samples(config, length, epochs)
    except (DataError, ModuleNotFoundError) as error:
        rule = f"is counted in the training data, which cannot be read: {error}"
        return DecidedConfig(config, problems=(config.problem(_EPOCHS, rule),))
    steps = max(1, BatchSchedule.of(config, batch).steps(samples))
    counted = config.updated({"train_iters": steps}, without=(_EPOCHS,), source=config.source(_EPOCHS).derived(_EPOCHS))
    note = (
        f"{config.describe_setting(_EPOCHS)} is train_iters {steps:,}: {samples:,} samples of {length:,} tokens, "
        f"{batch.train_batch_size:,} a step"
    )
    return DecidedConfig(counted, (note,))


def _samples(config: NeoXConfig, length: int, epochs: float) -> int:
    """Return the number of samples of a length in a number of passes over the training data. Raises DataError."""
    from neox.data.pass_amounts import (  # numpy, which a dry run without data does not need
        rows_of_epochs,
        samples_of_epochs,
    )

    if config.preferences.on_preferences:
        return rows_of_epochs(config, length, epochs)
    return samples_of_epochs(config.data, length, epochs)


def with_loss_normalization(config: NeoXConfig) -> DecidedConfig:
    """Decide `loss_normalization: auto` if the labels of the training data are those of conversations."""
    labels = config.data.train_label_data_paths or ()
    if config.data.loss_normalization != "auto" or not any(map(_are_of_conversations, labels)):
        return DecidedConfig(config)
    source = config.source(_NORMALIZATION).derived(_NORMALIZATION)
    note = f"`{_NORMALIZATION}: auto` is tokens: the labels are of conversations"
    return DecidedConfig(config.updated({_NORMALIZATION: "tokens"}, source=source), (note,))


def _are_of_conversations(prefix: str) -> bool:
    """Return whether `preprocess_chat.py` wrote a dataset; False if its sidecar is missing or damaged."""
    try:
        from neox.data.token_files import sidecar  # numpy, which a dry run without data does not need

        found = sidecar.read_sidecar(prefix)
    except (DataError, ModuleNotFoundError):
        return False
    return found is not None and "chat" in found.settings


def epoch_samples(config: NeoXConfig) -> int:
    """Return the number of samples in one pass over the training data, if the log counts passes; else 0.

    Data that cannot be read has 0 samples here; `data_problems` says why it cannot.
    """
    if config.logging.log_style != "fleetx":
        return 0
    try:
        return _samples(config, config.model.seq_length or 0, 1)
    except (DataError, ModuleNotFoundError):
        return 0
