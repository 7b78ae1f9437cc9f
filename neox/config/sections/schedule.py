"""Section of what changes over a run: learning rate, batch size, sequence length."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from neox.config.sections.base import Section
from neox.config.sections.conditions import Excludes, OnlyWith, Requires
from neox.config.sections.numbers import (
    Beta,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
)

_TYPE = "scheduler.type"
_RANGE_TEST = OnlyWith(_TYPE, ("LRRangeTest",))
_ONE_CYCLE = OnlyWith(_TYPE, ("OneCycle",))
_WARMUP = OnlyWith(_TYPE, ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR"))
_WARMUP_RATES = OnlyWith(_TYPE, ("WarmupLR", "WarmupDecayLR"))
_TOTAL = OnlyWith(_TYPE, ("WarmupDecayLR", "WarmupCosineLR"))
_COSINE = OnlyWith(_TYPE, ("WarmupCosineLR",))
_CURRICULUM = OnlyWith("curriculum_learning.enabled")
_GROWTH = "curriculum_learning.schedule_type"
_GROWING = OnlyWith(_GROWTH, ("fixed_linear", "fixed_root"))
_DECAYS = OnlyWith("lr_decay_style", ("linear", "cosine", "exponential", "WSD"))
_WSD = OnlyWith("lr_decay_style", ("WSD",))


class SchedulerParams(Section):
    """Numbers of DeepSpeed's schedules, under its names; numbers of another type are refused. Steps count from 0."""

    lr_range_test_min_lr: Annotated[PositiveFloat, _RANGE_TEST] = 0.001
    """First learning rate."""

    lr_range_test_step_size: Annotated[PositiveInt, _RANGE_TEST] = 2000
    """Number of steps in which it grows by lr_range_test_step_rate times the first one."""

    lr_range_test_step_rate: Annotated[NonNegativeFloat, _RANGE_TEST] = 1.0
    """Growth, as a multiple of the first learning rate."""

    lr_range_test_staircase: Annotated[bool, _RANGE_TEST] = False
    """Grow once every lr_range_test_step_size steps, instead of a little in each step."""

    cycle_min_lr: Annotated[NonNegativeFloat | None, _ONE_CYCLE] = None
    """Learning rate at the start and the end of a cycle. Required."""

    cycle_max_lr: Annotated[PositiveFloat | None, _ONE_CYCLE] = None
    """Learning rate in the middle of the cycle. Required."""

    decay_lr_rate: Annotated[NonNegativeFloat, _ONE_CYCLE] = 0.0
    """After the cycle: cycle_min_lr / (1 + decay_lr_rate x steps / decay_step_size)."""

    cycle_first_step_size: Annotated[PositiveInt, _ONE_CYCLE] = 2000
    """Number of steps of the rising half."""

    cycle_second_step_size: Annotated[PositiveInt | None, _ONE_CYCLE] = None
    """Number of steps of the falling half, by default cycle_first_step_size."""

    cycle_first_stair_count: Annotated[NonNegativeInt, _ONE_CYCLE] = 0
    """Number of stairs of the rising half; 0 is continuous."""

    cycle_second_stair_count: Annotated[NonNegativeInt | None, _ONE_CYCLE] = None
    """Number of stairs of the falling half, by default cycle_first_stair_count."""

    decay_step_size: Annotated[NonNegativeInt, _ONE_CYCLE] = 0
    """Number of steps that decay_lr_rate and decay_mom_rate refer to; 0 is no decay."""

    cycle_momentum: Annotated[bool, _ONE_CYCLE] = True
    """Move the first of the optimizer's betas against the learning rate. (The second is then 0.99, as in DeepSpeed.)"""

    cycle_min_mom: Annotated[Beta, _ONE_CYCLE] = 0.8
    """First beta in the middle of the cycle."""

    cycle_max_mom: Annotated[Beta, _ONE_CYCLE] = 0.9
    """First beta at the start and the end of the cycle."""

    decay_mom_rate: Annotated[NonNegativeFloat, _ONE_CYCLE] = 0.0
    """After the cycle: cycle_max_mom x (1 + decay_mom_rate x steps / decay_step_size), which must stay below 1."""

    warmup_min_lr: Annotated[NonNegativeFloat, _WARMUP_RATES] = 0.0
    """Learning rate at the start."""

    warmup_max_lr: Annotated[PositiveFloat | None, _WARMUP_RATES] = None
    """Learning rate after the warm-up. By default optimizer.params.lr with WarmupLR, and 0.001 with WarmupDecayLR."""

    warmup_min_ratio: Annotated[Fraction, _COSINE] = 0.0
    """Start of the warm-up, as a fraction of optimizer.params.lr."""

    warmup_num_steps: Annotated[PositiveInt, _WARMUP] = 1000
    """Number of steps of the warm-up; 1 counts as 2."""

    warmup_type: Annotated[Literal["log", "linear"], _WARMUP] = "log"
    """Shape of the warm-up."""

    total_num_steps: Annotated[PositiveInt | None, _TOTAL] = None
    """Step at which the decay ends, by default train_iters (DeepSpeed requires the key)."""

    cos_min_ratio: Annotated[Fraction, _COSINE] = 0.0001
    """End of the decay, as a fraction of optimizer.params.lr."""


class SchedulerSettings(Section):
    """DeepSpeed's `scheduler` block: one of its schedules, in place of lr_decay_style, warmup and min_lr."""

    type: Literal["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]
    """Name of DeepSpeed's class."""

    params: SchedulerParams = Field(default_factory=SchedulerParams)
    """Its numbers."""


class CurriculumSchedule(Section):
    """Growth of the length."""

    total_curriculum_step: Annotated[PositiveInt | None, _GROWING] = None
    """Step that first has max_difficulty."""

    difficulty_step: Annotated[PositiveInt | None, _GROWING] = None
    """Lengths are multiples of this; 8 or more is fast on GPUs."""

    root_degree: Annotated[PositiveInt | None, OnlyWith(_GROWTH, ("fixed_root",))] = None
    """The length grows with this root of the step."""

    difficulty: Annotated[tuple[int, ...], OnlyWith(_GROWTH, ("fixed_discrete",))] = ()
    """Lengths, ascending."""

    max_step: Annotated[tuple[int, ...], OnlyWith(_GROWTH, ("fixed_discrete",))] = ()
    """Last step of each length, except for the last length; steps count from 1."""


def _needed_by(key: str, *types: str) -> Requires:
    """Return the marker of types of growth that need a key of `schedule_config`."""
    return Requires(f".schedule_config.{key}", when=types, advice="give every number of this growth")


class CurriculumSettings(Section):
    """DeepSpeed's `curriculum_learning` block: training begins with short samples (arXiv:2108.06084).

    A sample is cut to the length of its step, and the rest of it is not trained on. Evaluations use seq_length.
    """

    enabled: Annotated[
        bool,
        Excludes("objective", ("masked_lm",), reason="it cuts samples, which would lose sentences"),
        Requires(".min_difficulty", when=(True,), advice="give the first and the last length"),
        Requires(".max_difficulty", when=(True,), advice="give the first and the last length"),
    ] = False
    """Whether lengths change."""

    curriculum_type: Annotated[Literal["seqlen"], _CURRICULUM] = "seqlen"
    """What changes: the tokens of a sample."""

    min_difficulty: Annotated[PositiveInt | None, _CURRICULUM] = None
    """First length."""

    max_difficulty: Annotated[PositiveInt | None, _CURRICULUM] = None
    """Last length, commonly seq_length."""

    schedule_type: Annotated[
        Literal["fixed_linear", "fixed_root", "fixed_discrete"],
        _CURRICULUM,
        *(_needed_by(key, "fixed_linear", "fixed_root") for key in ("total_curriculum_step", "difficulty_step")),
        _needed_by("root_degree", "fixed_root"),
        *(_needed_by(key, "fixed_discrete") for key in ("difficulty", "max_step")),
    ] = "fixed_linear"
    """How the length grows."""

    schedule_config: CurriculumSchedule = Field(default_factory=CurriculumSchedule)
    """Numbers of the growth."""


class ScheduleConfig(Section):
    """Batch size, sequence length, and learning rate: warm-up and decay from `optimizer.params.lr`, or DeepSpeed's."""

    lr_decay_style: Literal["constant", "linear", "cosine", "exponential", "WSD"] = "linear"
    """Shape of the decay. `WSD` (warm-up, stable, decay; arXiv:2404.06395): the peak is held, and only the last
    lr_wsd_decay_iters of lr_decay_iters go down, so that a run can be continued from before them."""

    lr_decay_iters: PositiveInt | None = None
    """Number of iterations of the decay, by default train_iters."""

    lr_decay_fraction: Annotated[
        PositiveFraction | None, Excludes("lr_decay_iters", reason="both set the length of the decay")
    ] = None
    """lr_decay_iters as a fraction of train_iters."""

    min_lr: Annotated[NonNegativeFloat, _DECAYS] = 0.0
    """Smallest learning rate after warm-up."""

    warmup: Fraction = 0.01
    """Fraction of lr_decay_iters in which the learning rate rises linearly. The first step has the rate of the second,
    peak / warm-up steps, as in gpt-neox since May 2026: with a rate of 0 it would train nothing. A run that is resumed
    with another length keeps the steps of its warm-up, unless warmup has changed or override_lr_scheduler is set."""

    lr_warmup_iters: NonNegativeFloat | None = None
    """Number of iterations of the warm-up, in place of warmup (Megatron-LM's name). The first two of them have the same
    rate, as with warmup."""

    lr_schedule_version: Literal["v2.0", "later"] = "later"
    """Which of gpt-neox's two formulas is used. `v2.0` starts at 0 and is constant for the last warm-up length. `later`
    starts at peak / warm-up steps and reaches min_lr at the end. Use `v2.0` to resume or repeat an old run."""

    lr_wsd_decay_style: Annotated[Literal["exponential", "linear", "cosine", "minus_sqrt"], _WSD] = "exponential"
    """Shape of the decay of `WSD`, with Megatron's names. After a fraction p of the decay, the distance to min_lr is 2
    x 0.5^p - 1, 1 - p, half of 1 + cos(pi p), or 1 - sqrt(p) of the distance of the peak."""

    lr_wsd_decay_iters: Annotated[PositiveInt | None, _WSD] = None
    """Number of iterations of the decay of `WSD`, which requires it."""

    scheduler: SchedulerSettings | None = None
    """One of DeepSpeed's schedules, `{type: WarmupDecayLR, params: {warmup_num_steps: 100}}`. The other keys of the
    learning rate then change nothing, with a note. Only steps that changed the weights count."""

    use_checkpoint_lr_scheduler: Annotated[
        bool, Excludes("finetune", reason="a fine-tuning has a schedule of its own")
    ] = False
    """Go on with the schedule of the checkpoint to load: its peak, warm-up, decay and their lengths replace the keys of
    this configuration, with a note. Otherwise the schedule follows these keys."""

    rampup_batch_size: tuple[PositiveInt, PositiveInt, PositiveInt] | None = None
    """Megatron's ramp-up of the batch, `[32, 32, 1000000]`: first size, increment, and number of samples after which
    the size is train_batch_size. Each size before that has the same number of samples. All sizes are multiples of one
    micro batch of all data-parallel ranks. The learning rate follows the steps."""

    curriculum_learning: CurriculumSettings | None = None
    """Sequence length that grows during the run: `{enabled: true, min_difficulty: 64, max_difficulty: 2048,
    schedule_type: fixed_linear, schedule_config: {total_curriculum_step: 15000, difficulty_step: 8}}`."""

    def decay_iterations(self, train_iters: int | None) -> int:
        """Return the number of iterations of the decay: lr_decay_iters, or lr_decay_fraction of train_iters."""
        if self.lr_decay_iters is not None:
            return self.lr_decay_iters
        fraction = self.lr_decay_fraction or 1.0
        return max(1, round(fraction * (train_iters or 0)))

    def warmup_iterations(self, train_iters: int | None) -> float:
        """Return the number of iterations of the warm-up, which may be a fraction, as in gpt-neox."""
        if self.lr_warmup_iters is not None:
            return self.lr_warmup_iters
        return self.warmup * self.decay_iterations(train_iters)
