"""Learning-rate schedules, as functions of the step: gpt-neox's, warm-up-stable-decay, and DeepSpeed's."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

from neox.config.neox_config import NeoXConfig
from neox.config.sections.schedule import SchedulerParams

DecayStyle = Literal["constant", "linear", "cosine", "exponential", "WSD"]
FinalDecay = Literal["exponential", "linear", "cosine", "minus_sqrt"]
ScheduleVersion = Literal["v2.0", "later"]
_HALF_LIFE = 0.693  # gpt-neox's rounding of ln 2
_SECOND_BETA = 0.99  # DeepSpeed's, while the first one is scheduled


class Schedule(ABC):
    """Learning rate of each step, counted from 0 without the steps that fp16's loss scaler skips."""

    @abstractmethod
    def lr(self, step: int) -> float:
        """Return the learning rate of a step."""

    def betas(self, step: int) -> tuple[float, float] | None:
        """Return Adam's betas in a step; None for those of the configuration."""
        return None

    @abstractmethod
    def describe(self) -> str:
        """Return the schedule in one line."""


@dataclass(frozen=True)
class Annealing(Schedule):
    """Linear warm-up to a peak, then decay: the schedules of both gpt-neox versions, and WSD.

    Attributes:
        style: Decay after warm-up.
        start: Peak learning rate.
        minimum: Lower bound after warm-up.
        warmup_iterations: Steps of linear warm-up; may be a fraction, as in gpt-neox.
        decay_iterations: Step at which decay ends, warm-up included.
        version: `v2.0` is gpt-neox v2.0's formula, which decays over `decay_iterations` from the end of warm-up and is
            constant for the last `warmup_iterations`; `later` is that of later versions, which reaches the minimum at
            `decay_iterations`.
        final_decay: Shape of WSD's decay (Megatron-LM's `lr_wsd_decay_style`).
        final_iterations: Steps of WSD's decay.
    """

    style: DecayStyle
    start: float
    minimum: float
    warmup_iterations: float
    decay_iterations: int
    version: ScheduleVersion = "later"
    final_decay: FinalDecay = "exponential"
    final_iterations: int = 1

    def lr(self, step: int) -> float:
        """Return the learning rate of a step."""
        warm = self.warmup_iterations
        if warm > 0 and step <= warm:
            # Later versions do not waste the first step on a learning rate of zero; a warm-up shorter than one step
            # would then exceed the peak.
            return self.start * (step / warm if self.version == "v2.0" else min(1.0, max(1, step) / warm))
        if self.style == "constant":
            return max(self.start, self.minimum)
        if self.style == "WSD":
            return self._after_stable(step)
        # After the end the minimum holds (the cosine of later gpt-neox versions rises again, which is a mistake).
        done = min(step, self.decay_iterations - (warm if self.version == "v2.0" else 0)) - warm
        span = self.decay_iterations if self.version == "v2.0" else self.decay_iterations - warm
        progress = done / span if span > 0 else 1.0
        return max(self._decayed(progress), self.minimum)

    def _decayed(self, progress: float) -> float:
        """Return the learning rate after `progress` (0 to 1) of the decay, before the lower bound is applied."""
        if self.style == "linear":
            return self.start * (1.0 - progress)
        if self.style == "exponential":
            return self.start * math.exp(-_HALF_LIFE * progress)
        floor = 0.0 if self.version == "v2.0" else self.minimum
        return floor + (self.start - floor) / 2.0 * (math.cos(math.pi * progress) + 1.0)

    def _after_stable(self, step: int) -> float:
        progress = (step - (self.decay_iterations - self.final_iterations)) / self.final_iterations
        progress = min(max(progress, 0.0), 1.0)
        left = {
            "exponential": 2.0 * 0.5**progress - 1.0,
            "linear": 1.0 - progress,
            "cosine": (math.cos(math.pi * progress) + 1.0) / 2.0,
            "minus_sqrt": 1.0 - math.sqrt(progress),
        }[self.final_decay]
        return self.minimum + left * (self.start - self.minimum)

    def describe(self) -> str:
        """Return the schedule in one line."""
        rise = f"{self.warmup_iterations:,.10g} steps of warm-up to {self.start:g}"
        if self.style == "constant":
            return f"{rise}, then constant"
        if self.style == "WSD":
            stable = self.decay_iterations - self.final_iterations
            shape = f"{self.final_decay} down to {self.minimum:g} from step {stable:,} to {self.decay_iterations:,}"
            return f"WSD: {rise}, held, {shape}"
        version = "" if self.version == "later" else " (v2.0's form)"
        return f"{self.style}: {rise}, down to {self.minimum:g} at step {self.decay_iterations:,}{version}"


@dataclass(frozen=True)
class LRRangeTest(Schedule):
    """Steady growth, to find the largest learning rate that trains (arXiv:1803.09820)."""

    params: SchedulerParams

    def lr(self, step: int) -> float:
        """Return the learning rate of a step."""
        p = self.params
        grown = step / p.lr_range_test_step_size
        if p.lr_range_test_staircase:
            grown = math.floor(grown)
        return p.lr_range_test_min_lr * (1.0 + p.lr_range_test_step_rate * grown)

    def describe(self) -> str:
        """Return the schedule in one line."""
        p = self.params
        growth = f"{p.lr_range_test_step_rate:g} x that in every {p.lr_range_test_step_size:,} steps"
        return f"LRRangeTest: from {p.lr_range_test_min_lr:g}, plus {growth}"


@dataclass(frozen=True)
class OneCycle(Schedule):
    """One cycle up and down, with the first beta moving against it, then decay (arXiv:1803.09820)."""

    params: SchedulerParams
    lowest: float
    highest: float

    @property
    def _falling(self) -> int:
        return self.params.cycle_second_step_size or self.params.cycle_first_step_size

    def _height(self, step: int) -> float:
        """Return where a step of the cycle is between its bottom (0) and its top (1)."""
        p, rising = self.params, self.params.cycle_first_step_size
        at = step % (rising + self._falling)
        second = p.cycle_first_stair_count if p.cycle_second_stair_count is None else p.cycle_second_stair_count
        height, stairs = at / rising, p.cycle_first_stair_count
        if at > rising:
            height, stairs = (rising + self._falling - at) / self._falling, second
        return math.floor(height * stairs) / stairs if stairs else height

    def _decay_steps(self, step: int) -> int | None:
        """Return the steps since the cycle's end; None within the cycle, which DeepSpeed leaves a step late."""
        since = step - (self.params.cycle_first_step_size + self._falling)
        return since if since > 0 else None

    def lr(self, step: int) -> float:
        """Return the learning rate of a step."""
        p, since = self.params, self._decay_steps(step)
        if since is None:
            return self.lowest + (self.highest - self.lowest) * self._height(step)
        return self.lowest / (1.0 + p.decay_lr_rate * since / p.decay_step_size) if p.decay_step_size else self.lowest

    def betas(self, step: int) -> tuple[float, float] | None:
        """Return Adam's betas in a step; None for those of the configuration."""
        p, since = self.params, self._decay_steps(step)
        if not p.cycle_momentum:
            return None
        if step == 0:  # DeepSpeed starts with the smaller one
            return p.cycle_min_mom, _SECOND_BETA
        if since is None:
            first = p.cycle_max_mom - (p.cycle_max_mom - p.cycle_min_mom) * self._height(step)
        else:
            grown = p.decay_mom_rate * since / p.decay_step_size if p.decay_step_size else 0.0
            first = p.cycle_max_mom * (1.0 + grown)
        return first, _SECOND_BETA

    def describe(self) -> str:
        """Return the schedule in one line."""
        rising = self.params.cycle_first_step_size
        top = f"from {self.lowest:g} to {self.highest:g} at step {rising:,}"
        return f"OneCycle: {top}, back at step {rising + self._falling:,}"


@dataclass(frozen=True)
class Warmup(Schedule):
    """DeepSpeed's WarmupLR, WarmupDecayLR (linear decay) and WarmupCosineLR: step n has the value of their step n - 1.

    Attributes:
        params: Shape of the warm-up.
        decay: Decay after it.
        lowest: Learning rate at the start.
        highest: Learning rate after warm-up.
        final: Learning rate at the end of a cosine.
        total: Step at which the decay ends.
    """

    params: SchedulerParams
    decay: Literal["none", "linear", "cosine"]
    lowest: float
    highest: float
    final: float
    total: int

    @property
    def _warm(self) -> int:
        return max(2, self.params.warmup_num_steps)

    def lr(self, step: int) -> float:
        """Return the learning rate of a step."""
        done = step - 1
        if done < 0:
            return 0.0 if self.decay == "cosine" else self.lowest
        if done < self._warm:
            logarithmic = self.params.warmup_type == "log"
            risen = math.log(done + 1) / math.log(self._warm) if logarithmic else done / self._warm
            return self.lowest + (self.highest - self.lowest) * risen
        if self.decay == "none":
            return self.highest
        span = max(1, self.total - self._warm)
        if self.decay == "linear":
            return self.lowest + (self.highest - self.lowest) * max(0.0, (self.total - done) / span)
        progress = min(1.0, (done - self._warm + 1) / span)
        return self.final + (self.highest - self.final) * (1.0 + math.cos(math.pi * progress)) / 2.0

    def describe(self) -> str:
        """Return the schedule in one line."""
        name = {"none": "WarmupLR", "linear": "WarmupDecayLR", "cosine": "WarmupCosineLR"}[self.decay]
        shape = {"none": "then constant", "linear": f"down to {self.lowest:g}", "cosine": f"down to {self.final:g}"}
        end = "" if self.decay == "none" else f" at step {self.total:,}"
        rise = f"{self._warm:,} steps of {self.params.warmup_type} warm-up from {self.lowest:g} to {self.highest:g}"
        return f"{name}: {rise}, {shape[self.decay]}{end}"


def schedule_of(config: NeoXConfig) -> Schedule:
    """Return the schedule that a configuration asks for, which `validation` has accepted."""
    keys, peak = config.schedule, config.optimizer.optimizer.params.lr
    if keys.scheduler is not None:
        return _deepspeed_schedule(keys.scheduler.type, keys.scheduler.params, peak, config.training.train_iters)
    decay_iterations = keys.decay_iterations(config.training.train_iters)
    return Annealing(
        style=keys.lr_decay_style,
        start=peak,
        minimum=keys.min_lr,
        warmup_iterations=keys.warmup * decay_iterations,
        decay_iterations=decay_iterations,
        version=keys.lr_schedule_version,
        final_decay=keys.lr_wsd_decay_style,
        final_iterations=keys.lr_wsd_decay_iters or 1,
    )


def _deepspeed_schedule(kind: str, params: SchedulerParams, peak: float, train_iters: int | None) -> Schedule:
    total = params.total_num_steps or train_iters or 0
    if kind == "LRRangeTest":
        return LRRangeTest(params)
    if kind == "OneCycle":
        assert params.cycle_min_lr is not None, "validated"
        assert params.cycle_max_lr is not None, "validated"
        return OneCycle(params, params.cycle_min_lr, params.cycle_max_lr)
    if kind == "WarmupCosineLR":
        final = params.cos_min_ratio * peak
        return Warmup(params, "cosine", params.warmup_min_ratio * peak, peak, final, total)
    if kind == "WarmupLR":
        return Warmup(params, "none", params.warmup_min_lr, params.warmup_max_lr or peak, 0.0, total)
    return Warmup(params, "linear", params.warmup_min_lr, params.warmup_max_lr or 0.001, 0.0, total)
