"""Rules of what changes over a run: learning rate, sequence length."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from neox.config.neox_config import NeoXConfig
from neox.config.sections.conditions import any_of, effect_conditions
from neox.config.sections.schedule import (
    CurriculumSchedule,
    CurriculumSettings,
    ScheduleConfig,
    SchedulerParams,
    SchedulerSettings,
)
from neox.plan.schedule import schedule_of
from neox.problems import Problem

SCHEDULE_KEYS = (
    "lr_decay_style",
    "lr_decay_iters",
    "lr_decay_fraction",
    "min_lr",
    "warmup",
    "lr_warmup_iters",
    "lr_schedule_version",
    "lr_wsd_decay_style",
    "lr_wsd_decay_iters",
)
"""Keys of gpt-neox's learning rate schedule, in whose place `scheduler` puts one of DeepSpeed's."""
# Keys that decide how many iterations the learning rate decays.
_LENGTHS = ("lr_decay_iters", "lr_decay_fraction", "train_iters")


def schedule_problems(config: NeoXConfig) -> Iterator[Problem]:
    """Yield the rules about schedules that are broken."""
    scheduler = config.schedule.scheduler
    if scheduler is None:
        yield from _annealing(config)
        yield from _wsd(config)
    else:
        yield from _deepspeed_schedule(config, scheduler)
    curriculum = config.schedule.curriculum_learning
    if curriculum is not None and curriculum.enabled:
        yield from _curriculum(config, curriculum)


def _annealing(config: NeoXConfig) -> Iterator[Problem]:
    schedule = config.schedule
    if schedule.min_lr > config.optimizer.optimizer.params.lr:
        peak = config.describe_setting("optimizer.params.lr")
        rule = f"is larger than the peak {peak}; the schedule decays from the peak down to it"
        yield config.problem("min_lr", rule, "optimizer.params.lr")
    if schedule.lr_decay_style == "constant":
        return
    others = ("lr_schedule_version", "lr_decay_style")
    nothing_left = "leaves no iterations to decay; it is a part of lr_decay_iters and must be"
    if schedule.lr_warmup_iters is not None:
        yield from _warmup_steps(config, schedule.lr_warmup_iters)
    elif schedule.lr_schedule_version == "v2.0" and schedule.warmup > 0.5:
        yield config.problem("warmup", f"{nothing_left} at most 0.5 with the v2.0 form", *others)
    elif schedule.warmup == 1.0:
        yield config.problem("warmup", f"{nothing_left} below 1", *others)


def _warmup_steps(config: NeoXConfig, steps: float) -> Iterator[Problem]:
    """Yield a number of warm-up steps that leaves nothing of a decay whose end is known."""
    schedule = config.schedule
    if not schedule.lr_decay_iters and not config.training.train_iters:
        return
    total = schedule.decay_iterations(config.training.train_iters)
    is_older = schedule.lr_schedule_version == "v2.0"
    if steps > total / 2 if is_older else steps >= total:
        limit = f"at most {total / 2:g}" if is_older else f"below {total}"
        rule = f"leaves no iterations to decay: it must be {limit}, of the {total} steps of the schedule"
        yield config.problem("lr_warmup_iters", rule, "lr_schedule_version", "lr_decay_style", *_LENGTHS)


def leaves_a_decay(schedule: ScheduleConfig, warmup: float, train_iters: int | None) -> bool:
    """Return whether a number of warm-up steps leaves a schedule of some length its decay."""
    if schedule.lr_decay_style == "constant":
        return True
    total = schedule.decay_iterations(train_iters)
    if schedule.lr_decay_style == "WSD" and (schedule.lr_wsd_decay_iters or 0) > total - round(warmup):
        return False
    return warmup <= total / 2 if schedule.lr_schedule_version == "v2.0" else warmup < total


def _wsd(config: NeoXConfig) -> Iterator[Problem]:
    schedule = config.schedule
    if schedule.lr_decay_style != "WSD":
        return
    total = schedule.decay_iterations(config.training.train_iters)
    final = schedule.lr_wsd_decay_iters
    if final is None:
        rule = f"needs lr_wsd_decay_iters, the steps of its decay, such as {max(1, total // 10)}"
        yield config.problem("lr_decay_style", rule, "lr_wsd_decay_iters", *_LENGTHS)
        return
    if not schedule.lr_decay_iters and not config.training.train_iters:
        return  # the end is not known
    most = total - round(schedule.warmup_iterations(config.training.train_iters))
    if final > most:
        rule = f"does not fit between warm-up and the end, step {total}; use at most {most}"
        warmup = "warmup" if schedule.lr_warmup_iters is None else "lr_warmup_iters"
        yield config.problem("lr_wsd_decay_iters", rule, warmup, "lr_decay_style", *_LENGTHS)


def _deepspeed_schedule(config: NeoXConfig, scheduler: SchedulerSettings) -> Iterator[Problem]:
    params = scheduler.params
    for key in sorted(params.model_fields_set):
        conditions = effect_conditions(SchedulerParams.model_fields[key])
        if not any(condition.is_on(scheduler.type) for condition in conditions):
            kind = config.describe_setting("scheduler.type")
            rule = f"is no parameter of {kind}, only with {any_of(conditions)}; remove it"
            yield config.problem(f"scheduler.params.{key}", rule, "scheduler.type")
    if scheduler.type == "OneCycle":
        yield from _one_cycle(config, params)
    if scheduler.type in ("WarmupDecayLR", "WarmupCosineLR"):
        total = params.total_num_steps or config.training.train_iters
        if total is not None and total < params.warmup_num_steps:
            rule = f"leaves nothing of {total} steps to decay; give fewer"
            others = ("scheduler.type", "scheduler.params.total_num_steps", "train_iters")
            yield config.problem("scheduler.params.warmup_num_steps", rule, *others)


def _one_cycle(config: NeoXConfig, params: SchedulerParams) -> Iterator[Problem]:
    for key in ("cycle_min_lr", "cycle_max_lr"):
        if getattr(params, key) is None:
            yield config.problem("scheduler.type", f"needs scheduler.params.{key}", f"scheduler.params.{key}")
            return
    for low, high in (("cycle_min_lr", "cycle_max_lr"), ("cycle_min_mom", "cycle_max_mom")):
        if getattr(params, low) > getattr(params, high):
            highest = f"scheduler.params.{high}"
            above = config.describe_setting(highest)
            yield config.problem(f"scheduler.params.{low}", f"is larger than {above}; exchange them", highest)
    last_step = max(0, (config.training.train_iters or 1) - 1)
    betas = schedule_of(config).betas(last_step)
    if betas is not None and betas[0] >= 1.0:
        rule = (
            f"lets the first beta grow to {betas[0]:.3g} in the last step, and it must stay below 1; give a smaller one"
        )
        yield config.problem("scheduler.params.decay_mom_rate", rule, "scheduler", "train_iters")


def _curriculum(config: NeoXConfig, settings: CurriculumSettings) -> Iterator[Problem]:
    block = "curriculum_learning"
    if settings.min_difficulty is None or settings.max_difficulty is None:
        return  # a rule of the field `enabled`
    keys = settings.schedule_config
    highest = f"{block}.max_difficulty"
    if settings.min_difficulty > settings.max_difficulty:
        above = config.describe_setting(highest)
        yield config.problem(f"{block}.min_difficulty", f"is larger than {above}; lengths grow", highest)
    if max(settings.max_difficulty, *keys.difficulty, 0) > (config.model.seq_length or 0):
        rule = f"and all lengths must be at most {config.describe_setting('seq_length')}"
        yield config.problem(highest, rule, "seq_length", f"{block}.schedule_config.difficulty")
    if settings.schedule_type == "fixed_discrete" and keys.difficulty and keys.max_step:
        yield from _discrete_lengths(config, keys)


def _discrete_lengths(config: NeoXConfig, keys: CurriculumSchedule) -> Iterator[Problem]:
    lengths = "curriculum_learning.schedule_config.difficulty"
    steps = "curriculum_learning.schedule_config.max_step"
    if len(keys.difficulty) != len(keys.max_step) + 1:
        yield config.problem(steps, "must have one value less than difficulty: the last length stays", lengths)
    if not _ascends(keys.difficulty) or not _ascends(keys.max_step):
        yield config.problem(lengths, "and max_step must be above 0 and ascend", steps)


def _ascends(values: tuple[int, ...]) -> bool:
    return values[0] > 0 and all(lower < higher for lower, higher in pairwise(values))
