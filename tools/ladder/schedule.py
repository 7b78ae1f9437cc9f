"""Schedules of small runs: every length of the target's keeps its share of the run.

    target   0 |-- warm-up --|----------------------|--- decay ---| 150,000 steps
    small    0 |-w-|------|-d-| 8,000 steps

What has no such share is refused: losses of runs with different schedules do not lie on one curve.

The share is one of steps for learning rates, and one of samples for stages of the data. They differ if the target has a
ramp-up of its batch and the small runs have none:

    target   0 |- small batches -|------- full batches -------|   half of the steps, a quarter of the samples
    small    0 |------------------------------------------------|   half of the steps, half of the samples

A mixture is a share of what is read. A learning rate belongs to an update: the target's decay is a function of the
step, and `warmup` and `lr_decay_fraction` are shares of steps. No key bends that curve to samples, so all runs have it
over their steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from neox.config import NeoXConfig
from neox.config.sections.schedule import ScheduleConfig
from neox.plan import RunPlan

_SHARES = (
    "lr_decay_style",
    "lr_decay_fraction",
    "min_lr",
    "warmup",
    "lr_schedule_version",
    "lr_wsd_decay_style",
    "use_checkpoint_lr_scheduler",
)
"""Keys of a schedule that hold for a run of any length. `min_lr` follows the learning rate."""
_IN_STEPS = ("lr_decay_iters", "lr_warmup_iters", "lr_wsd_decay_iters")
"""Keys whose steps are scaled."""
_STARTS = ("start_step", "start_tokens", "start_fraction")
"""Keys that say where a stage of the data starts; the fourth one starts it with the decay of the learning rate."""
_WAYS_OUT = {
    "scheduler": "give lr_decay_style and warmup in the target's files instead; its steps and rates are not scaled",
    "rampup_batch_size": "its samples and sizes are not scaled; `set: {rampup_batch_size: null}` trains the small "
    "runs without it, which the prediction is then of",
    "curriculum_learning": "its lengths and steps are not scaled; `set: {curriculum_learning: null}` trains the small "
    "runs without it, which the prediction is then of",
    "train_data_max_passes": "small runs read less, so their mixture would be another one; "
    "`set: {train_data_max_passes: null, train_data_weights: [...]}` gives all runs the target's shares",
}
SWITCHES = ("rampup_batch_size", "curriculum_learning")
"""Keys of a schedule that small runs may switch off."""


def is_off(value: Any) -> bool:
    """Return whether a value switches a key or a block of keys off."""
    return value is None or value is False or (isinstance(value, Mapping) and value.get("enabled") is False)


def unscaled_keys(config: NeoXConfig) -> Iterator[str]:
    """Yield each key in force that cannot be scaled to fewer steps, with what to do.

    Args:
        config: The target's configuration, with the settings of the small runs.
    """
    flat = config.to_flat()
    for key in (*ScheduleConfig.model_fields, "train_data_max_passes"):
        if key in (*_SHARES, *_IN_STEPS) or is_off(flat.get(key)):
            continue
        yield f"{config.describe_setting(key)} of the target: {_WAYS_OUT.get(key, 'small runs cannot scale it')}"


def scaled_schedule(target: RunPlan, steps: int) -> dict[str, Any]:
    """Return the keys that give a run of so many steps the target's schedule.

    Args:
        target: The target's plan.
        steps: Steps of the small run.
    """
    schedule = target.config.schedule
    all_steps = target.config.training.train_iters or 1
    share = steps / all_steps
    values: dict[str, Any] = {}
    if schedule.lr_decay_iters is not None:
        values["lr_decay_iters"] = max(1, round(share * schedule.lr_decay_iters))
    if schedule.lr_warmup_iters is not None:
        values["lr_warmup_iters"] = share * schedule.lr_warmup_iters  # steps of a warm-up may be a fraction
    if schedule.lr_wsd_decay_iters is not None:
        # Rounded down: with the warm-up it must fit into the whole.
        values["lr_wsd_decay_iters"] = max(1, math.floor(share * schedule.lr_wsd_decay_iters))

    # Stages of the data start at the same share of the samples. The plan knows the step of each, however it is given.
    # One that starts with the decay of the learning rate goes on doing so.
    stages = []
    samples = target.batch_schedule.samples
    all_given = target.config.to_flat().get("data_stages") or ()
    mixtures = target.batch_schedule.mixtures[: len(all_given)]
    for given, mixture in zip(all_given, mixtures, strict=True):
        stage = {key: value for key, value in given.items() if key not in _STARTS}
        if len(stage) < len(given):
            stage["start_fraction"] = samples(mixture.step) / samples(all_steps)
        stages.append(stage)
    if stages:
        values["data_stages"] = stages
    return values
