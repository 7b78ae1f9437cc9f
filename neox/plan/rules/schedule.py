"""Rules of what changes over a run: learning rate, sequence length."""

from __future__ import annotations

from collections.abc import Iterator

from neox.config.neox_config import NeoXConfig
from neox.config.sections.base import any_of, conditions_of
from neox.config.sections.schedule import SchedulerParams
from neox.plan.schedule import schedule_of
from neox.problems import Note, Problem

# Keys of the learning rate that DeepSpeed's schedules replace.
_FLAT_KEYS = (
    *("lr_decay_style", "lr_decay_iters", "lr_decay_fraction", "min_lr", "warmup", "lr_schedule_version"),
    *("lr_wsd_decay_style", "lr_wsd_decay_iters"),
)


# Keys that decide how many iterations the learning rate decays.
_LENGTHS = ("lr_decay_iters", "lr_decay_fraction", "train_iters")
_GROWTH = ("total_curriculum_step", "difficulty_step")


def schedule_problems(config: NeoXConfig) -> Iterator[Problem]:
    """Yield the rules about schedules that are broken."""
    yield from _deepspeed_schedule(config) if config.schedule.scheduler is not None else _annealing(config)
    yield from _curriculum(config)


def schedule_notes(config: NeoXConfig) -> Iterator[Note]:
    """Yield the keys of the learning rate that `scheduler` replaces."""
    given = [key for key in _FLAT_KEYS if config.given(key)]
    if config.schedule.scheduler is not None and given:
        keys = ", ".join(map(config.describe_setting, given))
        verb = "changes" if len(given) == 1 else "change"
        yield Note((*given, "scheduler"), f"{keys} {verb} nothing: `scheduler` sets the learning rate")


def _annealing(config: NeoXConfig) -> Iterator[Problem]:
    schedule = config.schedule
    if schedule.min_lr > config.optimizer.optimizer.params.lr:
        peak = config.describe_setting("optimizer.params.lr")
        rule = f"is larger than the peak {peak}; the schedule decays from the peak down to it"
        yield config.problem("min_lr", rule, "optimizer.params.lr")
    if schedule.lr_decay_iters is not None and schedule.lr_decay_fraction is not None:
        other = config.describe_setting("lr_decay_iters")
        yield config.problem("lr_decay_fraction", f"and {other} set the same thing; keep one", "lr_decay_iters")
    if schedule.lr_decay_style != "constant":
        longest = 0.5 if schedule.lr_schedule_version == "v2.0" else 1.0
        if schedule.warmup > longest or schedule.warmup == 1.0:
            allowed = "at most 0.5 with the v2.0 form" if longest == 0.5 else "below 1"
            yield config.problem(
                "warmup",
                f"leaves no iterations to decay; it is a part of lr_decay_iters and must be {allowed}",
                "lr_schedule_version",
                "lr_decay_style",
            )
    yield from _wsd(config)


def _wsd(config: NeoXConfig) -> Iterator[Problem]:
    schedule = config.schedule
    if schedule.lr_decay_style != "WSD":
        return
    total, final = schedule.decay_iterations(config.training.train_iters), schedule.lr_wsd_decay_iters
    if final is None:
        rule = f"needs lr_wsd_decay_iters, the steps of its decay, such as {max(1, total // 10)}"
        yield config.problem("lr_decay_style", rule, "lr_wsd_decay_iters", *_LENGTHS)
    elif (schedule.lr_decay_iters or config.training.train_iters) and final > (
        most := total - round(schedule.warmup * total)
    ):
        rule = f"does not fit between warm-up and the end, step {total}; use at most {most}"
        yield config.problem("lr_wsd_decay_iters", rule, "warmup", "lr_decay_style", *_LENGTHS)


def _deepspeed_schedule(config: NeoXConfig) -> Iterator[Problem]:
    scheduler = config.schedule.scheduler
    assert scheduler is not None
    params = scheduler.params
    for key in sorted(params.model_fields_set):
        conditions = conditions_of(SchedulerParams.model_fields[key])
        if not any(condition.is_on(scheduler.type) for condition in conditions):
            yield config.problem(
                f"scheduler.params.{key}",
                f"is no parameter of {config.describe_setting('scheduler.type')}, only with {any_of(conditions)}; "
                "remove it",
                "scheduler.type",
            )
    if scheduler.type == "OneCycle":
        yield from _one_cycle(config, params)
    if scheduler.type in ("WarmupDecayLR", "WarmupCosineLR"):
        total = params.total_num_steps or config.training.train_iters
        if total is not None and total < params.warmup_num_steps:
            rule = f"leaves nothing of {total} steps to decay; give fewer"
            others = ("scheduler.type", "scheduler.params.total_num_steps", "train_iters")
            yield config.problem("scheduler.params.warmup_num_steps", rule, *others)


def _one_cycle(config: NeoXConfig, params: SchedulerParams) -> Iterator[Problem]:
    missing = [key for key in ("cycle_min_lr", "cycle_max_lr") if getattr(params, key) is None]
    if missing:
        yield config.problem("scheduler.type", f"needs scheduler.params.{missing[0]}", f"scheduler.params.{missing[0]}")
        return
    for low, high in (("cycle_min_lr", "cycle_max_lr"), ("cycle_min_mom", "cycle_max_mom")):
        if getattr(params, low) > getattr(params, high):
            highest = f"scheduler.params.{high}"
            above = config.describe_setting(highest)
            yield config.problem(f"scheduler.params.{low}", f"is larger than {above}; exchange them", highest)
    last = schedule_of(config).betas(max(0, (config.training.train_iters or 1) - 1))
    if last is not None and last[0] >= 1.0:
        yield config.problem(
            "scheduler.params.decay_mom_rate",
            f"lets the first beta grow to {last[0]:.3g} in the last step, and it must stay below 1; give a smaller one",
            "scheduler",
            "train_iters",
        )


def _curriculum(config: NeoXConfig) -> Iterator[Problem]:
    settings, block = config.schedule.curriculum_learning, "curriculum_learning"
    if settings is None or not settings.enabled:
        return
    if config.model.objective != "causal_lm":
        rule = f"cuts samples, which would lose sentences of {config.describe_setting('objective')}"
        yield config.problem(f"{block}.enabled", rule, "objective")
    keys = settings.schedule_config
    required = {"fixed_discrete": ("difficulty", "max_step"), "fixed_root": (*_GROWTH, "root_degree")}
    needed = [f"schedule_config.{key}" for key in required.get(settings.schedule_type, _GROWTH)]
    missing = [key for key in ("min_difficulty", "max_difficulty", *needed) if not config.value(f"{block}.{key}")]
    if missing or settings.min_difficulty is None or settings.max_difficulty is None:
        growth = f"{block}.schedule_type"
        needed = [f"{block}.{key}" for key in missing]
        rule = f"with {config.describe_setting(growth)} needs {', '.join(needed)}"
        yield config.problem(f"{block}.enabled", rule, growth, *needed)
        return
    if settings.min_difficulty > settings.max_difficulty:
        above = config.describe_setting(f"{block}.max_difficulty")
        yield config.problem(
            f"{block}.min_difficulty", f"is larger than {above}; lengths grow", f"{block}.max_difficulty"
        )
    if max(settings.max_difficulty, *keys.difficulty, 0) > (config.model.seq_length or 0):
        rule = f"and all lengths must be at most {config.describe_setting('seq_length')}"
        yield config.problem(f"{block}.max_difficulty", rule, "seq_length", f"{block}.schedule_config.difficulty")
    if settings.schedule_type == "fixed_discrete":
        at = f"{block}.schedule_config"
        if len(keys.difficulty) != len(keys.max_step) + 1:
            rule = "must have one value less than difficulty: the last length stays"
            yield config.problem(f"{at}.max_step", rule, f"{at}.difficulty")
        if any(min(values) < 1 or list(values) != sorted(set(values)) for values in (keys.difficulty, keys.max_step)):
            yield config.problem(f"{at}.difficulty", "and max_step must be above 0 and ascend", f"{at}.max_step")
