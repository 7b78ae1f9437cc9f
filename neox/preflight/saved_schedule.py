"""Learning rate schedule from the checkpoint that a training resumes from (`use_checkpoint_lr_scheduler`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from neox.checkpoint_files.finding import newest_checkpoint
from neox.config import NeoXConfig
from neox.plan import static_problems
from neox.plan.run_identity import saved_config
from neox.preflight.data_decisions import DecidedConfig
from neox.storage import is_remote

_KEY = "use_checkpoint_lr_scheduler"
_LENGTHS = ("lr_decay_iters", "lr_decay_fraction")
_SHAPE = (
    "lr_decay_style",
    "min_lr",
    "warmup",
    "lr_warmup_iters",
    "lr_schedule_version",
    "lr_wsd_decay_style",
    "lr_wsd_decay_iters",
    "scheduler",
)
_PEAK = "optimizer.params.lr"


def with_saved_schedule(config: NeoXConfig) -> DecidedConfig:
    """Replace the configuration's learning rate schedule (peak, shape and length) by that of the checkpoint to load.

    Args:
        config: The configuration, whose `load` is the checkpoint that the training resumes from, if there is one.

    Returns:
        The configuration with the checkpoint's schedule, and a note that lists the given keys that were replaced. There
        is a problem instead if the checkpoint's keys cannot be read.
    """
    if not config.schedule.use_checkpoint_lr_scheduler:
        return DecidedConfig(config)
    if config.value("override_lr_scheduler"):
        message = f"`{_KEY}` and `override_lr_scheduler` contradict each other; remove one"
        return DecidedConfig(config, problems=(config.problem_about(message, _KEY, "override_lr_scheduler"),))
    load = config.checkpoint.load
    if load is None or is_remote(load):
        place = "there is no checkpoint to load" if load is None else f"{load} has not been fetched yet"
        return DecidedConfig(config, (f"{_KEY}: {place}, so the configuration's schedule is used",))
    checkpoint = newest_checkpoint(load, config.checkpoint.iteration)
    if checkpoint is None:  # other checks report a missing checkpoint
        return DecidedConfig(config, (f"{_KEY}: {load} has no checkpoint, so the configuration's schedule is used",))
    saved = saved_config(checkpoint)
    if saved is None or (saved.training.train_iters is None and saved.schedule.lr_decay_iters is None):
        rule = f"needs the schedule of {checkpoint}, but its configs/ does not have it; set the schedule's keys instead"
        return DecidedConfig(config, problems=(config.problem(_KEY, rule),))
    changes = _keys_of(saved)
    without = [key for key in (*_SHAPE, *_LENGTHS) if key not in changes]
    if saved.value(_PEAK) != config.value(_PEAK):
        changes["optimizer"] = _with_peak(config, saved.value(_PEAK))
    scheduled = config.updated(changes, without=without, source=config.source(_KEY).derived(_KEY))
    note = f"{_KEY}: the schedule of {checkpoint} is used"
    replaced = list(_replaced(config, scheduled))
    if replaced:
        note += f", with {'; '.join(replaced)}"
    return DecidedConfig(scheduled, (note,))


def with_saved_warmup(config: NeoXConfig) -> DecidedConfig:
    """Keep the steps of the warm-up if a run resumes with another length.

    `warmup` is a fraction of the length. Without this, a run that is extended while it holds or leaves its peak would
    fall back into the warm-up of a longer run. A shorter run that has no room for the steps has the warm-up of its
    length, and no steps are kept before the length is known.
    """
    keys = config.checkpoint
    follows_keys = bool(config.value("override_lr_scheduler")) or config.schedule.lr_warmup_iters is not None
    has_length = config.training.train_iters is not None or config.schedule.lr_decay_iters is not None
    if keys.load is None or keys.finetune or is_remote(keys.load) or follows_keys or not has_length:
        return DecidedConfig(config)
    checkpoint = newest_checkpoint(keys.load, keys.iteration)
    saved = None if checkpoint is None else saved_config(checkpoint)
    if saved is None or config.schedule.scheduler is not None or saved.schedule.scheduler is not None:
        return DecidedConfig(config)
    before = saved.schedule.warmup_iterations(saved.training.train_iters)
    now = config.schedule.warmup_iterations(config.training.train_iters)
    if saved.schedule.warmup != config.schedule.warmup or before == now or not before:
        return DecidedConfig(config)
    source = config.source("warmup").derived("warmup of the checkpoint")
    kept = config.updated({"lr_warmup_iters": before}, source=source)
    if static_problems(kept):
        return DecidedConfig(config)
    note = f"the warm-up keeps its {before:,.10g} steps; `warmup` of the new length would be {now:,.10g}"
    return DecidedConfig(kept, (note,))


def _keys_of(saved: NeoXConfig) -> dict[str, Any]:
    """Return the schedule's keys in a checkpoint's configuration, with the length of the decay in steps."""
    given = saved.to_flat()
    keys: dict[str, Any] = {"lr_decay_iters": saved.schedule.decay_iterations(saved.training.train_iters)}
    for key in _SHAPE:
        if key in given:
            keys[key] = given[key]
    return keys


def _with_peak(config: NeoXConfig, peak: float) -> dict[str, Any]:
    """Return the block `optimizer` with another learning rate."""
    given = config.to_flat()
    block: Mapping[str, Any] = given.get("optimizer") or {}
    kind = block.get("type", config.optimizer.optimizer.type)
    return {**block, "type": kind, "params": {**block.get("params", {}), "lr": peak}}


def _replaced(config: NeoXConfig, scheduled: NeoXConfig) -> Iterator[str]:
    """Yield the given keys whose values the checkpoint changes, with both values."""
    for key in (*_SHAPE, *_LENGTHS, _PEAK):
        if config.given(key) and config.value(key) != scheduled.value(key):
            yield f"{key} {scheduled.value(key)} instead of {config.describe_setting(key)}"
