"""DeepSpeed's learning-rate schedules, as functions of the step."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass

from neox.config.sections.schedule import SchedulerParams
from neox.plan.schedule.annealing import Schedule

_SECOND_BETA = 0.99  # DeepSpeed's, while the first one is scheduled


@dataclass(frozen=True)
class LRRangeTest(Schedule):
    """Steady growth, to find the largest learning rate that trains (arXiv:1803.09820)."""

    params: SchedulerParams

    def lr(self, step: int) -> float:
        """Return the learning rate of a step."""
        grown = step / self.params.lr_range_test_step_size
        if self.params.lr_range_test_staircase:
            grown = math.floor(grown)
        return self.params.lr_range_test_min_lr * (1.0 + self.params.lr_range_test_step_rate * grown)

    def describe(self) -> str:
        """Return the schedule in one line."""
        rate = f"{self.params.lr_range_test_step_rate:g} x that"
        growth = f"plus {rate} in every {self.params.lr_range_test_step_size:,} steps"
        return f"LRRangeTest: from {self.params.lr_range_test_min_lr:g}, {growth}"


@dataclass(frozen=True)
class OneCycle(Schedule):
    """One cycle up and down, with the first beta moving against it, then decay (arXiv:1803.09820).

    Attributes:
        params: Shape of the cycle.
        lowest: Learning rate at the start and the end of the cycle.
        highest: Learning rate in its middle.
    """

    params: SchedulerParams
    lowest: float
    highest: float

    def lr(self, step: int) -> float:
        """Return the learning rate of a step."""
        after_cycle = self._steps_after_cycle(step)
        if after_cycle == 0:
            return self.lowest + (self.highest - self.lowest) * self._height(step)
        if not self.params.decay_step_size:
            return self.lowest
        return self.lowest / (1.0 + self.params.decay_lr_rate * after_cycle / self.params.decay_step_size)

    def betas(self, step: int) -> tuple[float, float] | None:
        """Return Adam's betas in a step; None for those of the configuration."""
        params = self.params
        if not params.cycle_momentum:
            return None
        if step == 0:  # DeepSpeed starts with the smaller one
            return params.cycle_min_mom, _SECOND_BETA
        after_cycle = self._steps_after_cycle(step)
        first = params.cycle_max_mom
        if after_cycle == 0:
            first -= (params.cycle_max_mom - params.cycle_min_mom) * self._height(step)
        elif params.decay_step_size:
            first *= 1.0 + params.decay_mom_rate * after_cycle / params.decay_step_size
        return first, _SECOND_BETA

    @property
    def _rising(self) -> int:
        return self.params.cycle_first_step_size

    @property
    def _falling(self) -> int:
        return self.params.cycle_second_step_size or self._rising

    def _height(self, step: int) -> float:
        """Return where a step of the cycle is between its bottom (0) and its top (1)."""
        at = step % (self._rising + self._falling)
        stairs = self.params.cycle_first_stair_count
        if at <= self._rising:
            height = at / self._rising
        else:
            height = (self._rising + self._falling - at) / self._falling
            if self.params.cycle_second_stair_count is not None:
                stairs = self.params.cycle_second_stair_count
        return math.floor(height * stairs) / stairs if stairs else height

    def _steps_after_cycle(self, step: int) -> int:
        """Return the steps since the cycle's end; 0 within the cycle, which DeepSpeed leaves a step late."""
        return max(0, step - self._rising - self._falling)

    def describe(self) -> str:
        """Return the schedule in one line."""
        top = f"from {self.lowest:g} to {self.highest:g} at step {self._rising:,}"
        return f"OneCycle: {top}, back at step {self._rising + self._falling:,}"


@dataclass(frozen=True)
class WarmupLR(Schedule):
    """DeepSpeed's WarmupLR: warm-up, then constant. Step n has the value of DeepSpeed's step n - 1.

    Attributes:
        params: Shape of the warm-up.
        lowest: Learning rate at the start.
        highest: Learning rate after the warm-up.
    """

    params: SchedulerParams
    lowest: float
    highest: float

    def lr(self, step: int) -> float:
        """Return the learning rate of a step."""
        done = step - 1
        if done < 0:
            return self._before_first
        if done >= self._warm:
            return self._after_warmup(done)
        if self.params.warmup_type == "log":
            risen = math.log(done + 1) / math.log(self._warm)
        else:
            risen = done / self._warm
        return self.lowest + (self.highest - self.lowest) * risen

    @property
    def _warm(self) -> int:
        """Steps of warm-up."""
        return max(2, self.params.warmup_num_steps)

    @property
    def _before_first(self) -> float:
        """Learning rate of step 0, which DeepSpeed counts as -1."""
        return self.lowest

    def _after_warmup(self, done: int) -> float:
        """Return the learning rate after the warm-up and `done` steps in all."""
        return self.highest

    def describe(self) -> str:
        """Return the schedule in one line."""
        rise = f"{self._warm:,} steps of {self.params.warmup_type} warm-up from {self.lowest:g} to {self.highest:g}"
        return f"{type(self).__name__}: {rise}, {self._describe_end()}"

    def _describe_end(self) -> str:
        return "then constant"


@dataclass(frozen=True)
class _WarmupAndDecay(WarmupLR):
    """Warm-up, then decay.

    Attributes:
        total: Step at which the decay ends.
    """

    total: int

    @property
    def _span(self) -> int:
        """Steps of the decay."""
        return max(1, self.total - self._warm)

    @property
    @abstractmethod
    def _end(self) -> float:
        """Learning rate at the end."""

    def _describe_end(self) -> str:
        return f"down to {self._end:g} at step {self.total:,}"


@dataclass(frozen=True)
class WarmupDecayLR(_WarmupAndDecay):
    """DeepSpeed's WarmupDecayLR: linear decay down to where the warm-up began."""

    def _after_warmup(self, done: int) -> float:
        return self.lowest + (self.highest - self.lowest) * max(0.0, (self.total - done) / self._span)

    @property
    def _end(self) -> float:
        return self.lowest


@dataclass(frozen=True)
class WarmupCosineLR(_WarmupAndDecay):
    """DeepSpeed's WarmupCosineLR: half a cosine down to a learning rate of its own.

    Attributes:
        final: Learning rate at the end.
    """

    final: float

    @property
    def _before_first(self) -> float:
        return 0.0

    def _after_warmup(self, done: int) -> float:
        progress = min(1.0, (done - self._warm + 1) / self._span)
        return self.final + (self.highest - self.final) * (1.0 + math.cos(math.pi * progress)) / 2.0

    @property
    def _end(self) -> float:
        return self.final
