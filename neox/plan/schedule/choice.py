"""Choice of the learning-rate schedule that a configuration asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from neox.config.neox_config import NeoXConfig
from neox.config.sections.schedule import SchedulerParams
from neox.plan.schedule.annealing import Annealing, Schedule, WarmupStableDecay
from neox.plan.schedule.deepspeed import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR


def schedule_of(config: NeoXConfig) -> Schedule:
    """Return the schedule that a configuration asks for, which the rules have accepted.

    Raises:
        KeyError: The configuration names a schedule that is not in a table here.
    """
    schedule = config.schedule
    peak = config.optimizer.optimizer.params.lr
    train_iters = config.training.train_iters
    if schedule.scheduler is not None:
        params = schedule.scheduler.params
        total = params.total_num_steps or train_iters or 0
        return _DEEPSPEED_SCHEDULES[schedule.scheduler.type](params, peak, total)
    decay_iterations = schedule.decay_iterations(train_iters)
    warmup_iterations = schedule.warmup_iterations(train_iters)
    if schedule.lr_decay_style == "WSD":
        return WarmupStableDecay(
            style="WSD",
            start=peak,
            minimum=schedule.min_lr,
            warmup_iterations=warmup_iterations,
            decay_iterations=decay_iterations,
            version=schedule.lr_schedule_version,
            final_decay=schedule.lr_wsd_decay_style,
            final_iterations=schedule.lr_wsd_decay_iters or 1,
        )
    return Annealing(
        style=schedule.lr_decay_style,
        start=peak,
        minimum=schedule.min_lr,
        warmup_iterations=warmup_iterations,
        decay_iterations=decay_iterations,
        version=schedule.lr_schedule_version,
    )


def _lr_range_test(params: SchedulerParams, peak: float, total: int) -> Schedule:
    return LRRangeTest(params)


def _one_cycle(params: SchedulerParams, peak: float, total: int) -> Schedule:
    assert params.cycle_min_lr is not None, "the rules require it"
    assert params.cycle_max_lr is not None, "the rules require it"
    return OneCycle(params, params.cycle_min_lr, params.cycle_max_lr)


def _warmup(params: SchedulerParams, peak: float, total: int) -> Schedule:
    return WarmupLR(params, params.warmup_min_lr, params.warmup_max_lr or peak)


def _warmup_decay(params: SchedulerParams, peak: float, total: int) -> Schedule:
    highest = params.warmup_max_lr or 0.001  # DeepSpeed's default
    return WarmupDecayLR(params, params.warmup_min_lr, highest, total)


def _warmup_cosine(params: SchedulerParams, peak: float, total: int) -> Schedule:
    return WarmupCosineLR(params, params.warmup_min_ratio * peak, peak, total, final=params.cos_min_ratio * peak)


_DEEPSPEED_SCHEDULES: Mapping[str, Callable[[SchedulerParams, float, int], Schedule]] = MappingProxyType(
    {
        "LRRangeTest": _lr_range_test,
        "OneCycle": _one_cycle,
        "WarmupLR": _warmup,
        "WarmupDecayLR": _warmup_decay,
        "WarmupCosineLR": _warmup_cosine,
    }
)
"""`scheduler.type` -> function (its numbers, the optimizer's learning rate, steps of the run) to the schedule."""
