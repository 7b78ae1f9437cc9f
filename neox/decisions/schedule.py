"""Learning rate schedule and warm-up of the checkpoint from which a training continues."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from neox.config import NOTHING, Decided, Decision, NeoXConfig
from neox.plan.rules.schedule import SCHEDULE_KEYS, leaves_a_decay
from neox.plan.run_identity import FoundRun
from neox.plan.run_start import requested_start
from neox.storage import is_remote

_KEY = "use_checkpoint_lr_scheduler"
_LENGTHS = ("lr_decay_iters", "lr_decay_fraction")
_SHAPE = (*(key for key in SCHEDULE_KEYS if key not in _LENGTHS), "scheduler")
_PEAK = "optimizer.params.lr"


def decide_schedule(config: NeoXConfig, loaded: FoundRun | None) -> Decided:
    """Replace the configuration's learning rate schedule (peak, shape and length) by that of the checkpoint.

    Args:
        config: The configuration.
        loaded: Run of the checkpoint from which the training continues; None if it begins.

    Returns:
        The settings of the checkpoint's schedule if `use_checkpoint_lr_scheduler` asks for them; a problem if the
        checkpoint does not have them.
    """
    if not config.schedule.use_checkpoint_lr_scheduler:
        return NOTHING
    if config.value("override_lr_scheduler"):
        message = f"`{_KEY}` and `override_lr_scheduler` contradict each other; remove one"
        return Decided(problems=(config.problem_about(message, _KEY, "override_lr_scheduler"),))
    if loaded is None:
        load = requested_start(config).load
        place = "there is no checkpoint to load"
        if load is not None and is_remote(load):
            place = f"{load} has not been fetched yet"
        elif load is not None:
            place = f"{load} has no checkpoint"
        return Decided(notes=(f"{_KEY}: {place}, so the configuration's schedule is used",))
    checkpoint = loaded.checkpoint
    saved = loaded.saved_config
    if saved is None or (saved.training.train_iters is None and saved.schedule.lr_decay_iters is None):
        rule = f"needs the schedule of {checkpoint}, but its configs/ does not have it; set the schedule's keys instead"
        return Decided(problems=(config.problem(_KEY, rule),))
    values: dict[str, Any] = dict.fromkeys((*_SHAPE, *_LENGTHS)) | _keys_of(saved)
    if saved.value(_PEAK) != config.value(_PEAK):
        if "type" not in (config.to_flat().get("optimizer") or {}):
            values["optimizer.type"] = config.optimizer.optimizer.type
        values[_PEAK] = saved.value(_PEAK)
    reason = f"{_KEY}: the schedule of {checkpoint} is used"
    replaced = list(_replaced(config, saved, values))
    if replaced:
        reason += f", with {'; '.join(replaced)}"
    source = config.source(_KEY).derived(_KEY)
    decisions = tuple(Decision(key, value, reason, source) for key, value in values.items())
    return Decided(decisions, (reason,))


def decide_warmup(config: NeoXConfig, loaded: FoundRun | None, length: int | None) -> Decided:
    """Keep the steps of the warm-up if a run continues with another length.

    `warmup` is a fraction of the length. Without this, a run that is extended while it holds or leaves its peak would
    fall back into the warm-up of a longer run. A shorter run that has no room for the steps has the warm-up of its
    length.

    Args:
        config: The configuration.
        loaded: Run of the checkpoint from which the training continues; None if it begins.
        length: `train_iters`, given or counted; None if it is not known.
    """
    schedule = config.schedule
    saved = None if loaded is None else loaded.saved_config
    follows_keys = bool(config.value("override_lr_scheduler")) or schedule.lr_warmup_iters is not None
    if saved is None or follows_keys or schedule.use_checkpoint_lr_scheduler:
        return NOTHING
    if schedule.scheduler is not None or saved.schedule.scheduler is not None:
        return NOTHING
    if length is None and schedule.lr_decay_iters is None:
        return NOTHING
    before = saved.schedule.warmup_iterations(saved.training.train_iters)
    now = schedule.warmup_iterations(length)
    if saved.schedule.warmup != schedule.warmup or before == now or not before:
        return NOTHING
    if not leaves_a_decay(schedule, before, length):
        return NOTHING
    reason = f"the warm-up keeps its {before:,.10g} steps; `warmup` of the new length would be {now:,.10g}"
    source = config.source("warmup").derived("warmup of the checkpoint")
    return Decided((Decision("lr_warmup_iters", before, reason, source),), (reason,))


def _keys_of(saved: NeoXConfig) -> dict[str, Any]:
    """Return the schedule's keys in a checkpoint's configuration, with the length of the decay in steps."""
    given: Mapping[str, Any] = saved.to_flat()
    keys: dict[str, Any] = {"lr_decay_iters": saved.schedule.decay_iterations(saved.training.train_iters)}
    for key in _SHAPE:
        if key in given:
            keys[key] = given[key]
    return keys


def _replaced(config: NeoXConfig, saved: NeoXConfig, values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the explicit keys whose values the checkpoint changes, with both values."""
    for key in (*_SHAPE, *_LENGTHS, _PEAK):
        now = values.get(key)
        if key == _PEAK:
            now = saved.value(_PEAK)
        if config.given(key) and config.value(key) != now:
            yield f"{key} {now} instead of {config.describe_setting(key)}"
