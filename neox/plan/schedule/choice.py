"""Choice of the learning-rate schedule that a configuration asks for."""

from __future__ import annotations

from neox.config.neox_config import NeoXConfig
from neox.errors import ConfigError
from neox.plan.schedule.deepspeed import LRRangeTest, OneCycle, Warmup, WarmupCosineLR, WarmupDecayLR, WarmupLR
from neox.plan.schedule.gpt_neox import Annealing, Schedule, WarmupStableDecay


def schedule_of(config: NeoXConfig) -> Schedule:
    """Return the schedule that a configuration asks for. The configuration must have passed the rules.

    Raises:
        KeyError: The configuration names a schedule that nothing here computes.
        ConfigError: The end of a decay is not known.
    """
    keys = config.schedule
    if keys.scheduler is not None:
        return _deepspeed_schedule(config)
    train_iters = config.training.train_iters
    peak = config.optimizer.optimizer.params.lr
    warmup_steps = keys.warmup_iterations(train_iters)
    end_step = keys.decay_iterations(train_iters)
    if keys.lr_decay_style == "WSD":
        return WarmupStableDecay(
            decay=keys.lr_wsd_decay_style,
            peak=peak,
            lowest=keys.min_lr,
            warmup_steps=warmup_steps,
            decay_steps=keys.lr_wsd_decay_iters or 1,
            end_step=end_step,
            version=keys.lr_schedule_version,
        )
    return Annealing(
        style=keys.lr_decay_style,
        peak=peak,
        lowest=keys.min_lr,
        warmup_steps=warmup_steps,
        end_step=end_step,
        version=keys.lr_schedule_version,
    )


def _deepspeed_schedule(config: NeoXConfig) -> Schedule:
    """Return the schedule of `scheduler`, with DeepSpeed's defaults for numbers that are not given."""
    scheduler = config.schedule.scheduler
    assert scheduler is not None
    numbers = scheduler.params
    optimizer_lr = config.optimizer.optimizer.params.lr

    if scheduler.type == "LRRangeTest":
        return LRRangeTest(numbers)
    if scheduler.type == "OneCycle":
        assert numbers.cycle_min_lr is not None, "the rules require it"
        assert numbers.cycle_max_lr is not None, "the rules require it"
        rising = numbers.cycle_first_step_size
        falling = numbers.cycle_second_step_size or rising
        return OneCycle(numbers, numbers.cycle_min_lr, numbers.cycle_max_lr, rising, rising + falling)

    warmup_steps = max(2, numbers.warmup_num_steps)
    shape = numbers.warmup_type
    if scheduler.type == "WarmupLR":
        peak = numbers.warmup_max_lr or optimizer_lr
        return WarmupLR(Warmup(numbers.warmup_min_lr, peak, warmup_steps, shape))

    end_step = numbers.total_num_steps or config.training.train_iters
    if end_step is None:
        rule = "needs the step at which its decay ends; give it, or train_iters"
        raise ConfigError(config.problem("scheduler.params.total_num_steps", rule, "scheduler.type", "train_iters"))
    if scheduler.type == "WarmupDecayLR":
        peak = numbers.warmup_max_lr or 0.001
        return WarmupDecayLR(Warmup(numbers.warmup_min_lr, peak, warmup_steps, shape), end_step)
    if scheduler.type == "WarmupCosineLR":
        warmup = Warmup(numbers.warmup_min_ratio * optimizer_lr, optimizer_lr, warmup_steps, shape)
        return WarmupCosineLR(warmup, numbers.cos_min_ratio * optimizer_lr, end_step)
    raise KeyError(scheduler.type)
