"""DeepSpeed's learning-rate schedules, as functions of the step.

LRRangeTest and OneCycle count steps as we do. The three warm-ups count from -1: before its first update DeepSpeed asks
for index -1, so our step n is its index n - 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from neox.config.sections.schedule import SchedulerParams
from neox.plan.schedule.gpt_neox import Schedule, half_cosine

_SECOND_BETA = 0.99  # DeepSpeed's, while the first one is scheduled


@dataclass(frozen=True)
class LRRangeTest(Schedule):
    """Steady growth, to find the largest learning rate that trains (arXiv:1803.09820)."""

    params: SchedulerParams

    def lr(self, step: int) -> float:
        """Return the learning rate of a step."""
        intervals = step / self.params.lr_range_test_step_size
        if self.params.lr_range_test_staircase:
            intervals = math.floor(intervals)
        return self.params.lr_range_test_min_lr * (1.0 + self.params.lr_range_test_step_rate * intervals)

    def describe(self) -> str:
        """Return the schedule in one line."""
        rate = f"{self.params.lr_range_test_step_rate:g} x that"
        growth = f"plus {rate} in every {self.params.lr_range_test_step_size:,} steps"
        return f"LRRangeTest: from {self.params.lr_range_test_min_lr:g}, {growth}"


@dataclass(frozen=True)
class OneCycle(Schedule):
    r"""One cycle up and down, with the first beta moving against it, then decay (arXiv:1803.09820).

        peak    _ _ _ _/\
                     /    \
        lowest  _ _/_ _ _ _ \ .  _
                                  `  -  .
                  0   rising  cycle_steps

    Attributes:
        params: Numbers of the cycle and the decay.
        lowest: Learning rate at the start and the end of the cycle.
        peak: Learning rate in its middle.
        rising_steps: Steps of the first half.
        cycle_steps: Steps of both halves.
    """

    params: SchedulerParams
    lowest: float
    peak: float
    rising_steps: int
    cycle_steps: int

    def lr(self, step: int) -> float:
        """Return the learning rate of a step."""
        # The cycle's last step still belongs to it (height 0); as in DeepSpeed the decay begins one step later.
        if step <= self.cycle_steps:
            return self.lowest + (self.peak - self.lowest) * self._height(step)
        if not self.params.decay_step_size:
            return self.lowest
        intervals = self.params.decay_lr_rate * (step - self.cycle_steps) / self.params.decay_step_size
        return self.lowest / (1.0 + intervals)

    def betas(self, step: int) -> tuple[float, float] | None:
        """Return the optimizer's betas in a step; None if they are not cycled."""
        params = self.params
        if not params.cycle_momentum:
            return None
        if step == 0:  # DeepSpeed starts with the smaller one, although the cycle starts with the larger one
            return params.cycle_min_mom, _SECOND_BETA
        first = params.cycle_max_mom
        if step <= self.cycle_steps:
            first -= (params.cycle_max_mom - params.cycle_min_mom) * self._height(step)
        elif params.decay_step_size:
            first *= 1.0 + params.decay_mom_rate * (step - self.cycle_steps) / params.decay_step_size
        return first, _SECOND_BETA

    def _height(self, step: int) -> float:
        """Return where a step of the cycle is between its bottom (0) and its top (1), in stairs if there are any."""
        stairs = self.params.cycle_first_stair_count
        if step <= self.rising_steps:
            height = step / self.rising_steps
        else:
            height = (self.cycle_steps - step) / (self.cycle_steps - self.rising_steps)
            if self.params.cycle_second_stair_count is not None:
                stairs = self.params.cycle_second_stair_count
        if stairs:
            return math.floor(height * stairs) / stairs
        return height

    def describe(self) -> str:
        """Return the schedule in one line."""
        top = f"from {self.lowest:g} to {self.peak:g} at step {self.rising_steps:,}"
        return f"OneCycle: {top}, back at step {self.cycle_steps:,}"


@dataclass(frozen=True)
class Warmup:
    """The rise that DeepSpeed's three warm-ups share.

    Attributes:
        first: Learning rate at the start.
        peak: Learning rate at the end.
        steps: Steps of the rise, at least 2.
        shape: `linear`, or `log`: fast at first.
    """

    first: float
    peak: float
    steps: int
    shape: str

    def lr(self, index: int) -> float:
        """Return the learning rate at DeepSpeed's index, -1 <= index < steps."""
        if index < 0:
            return self.first
        if self.shape == "log":
            risen = math.log(index + 1) / math.log(self.steps)
        else:
            risen = index / self.steps
        return self.first + (self.peak - self.first) * risen

    def describe(self) -> str:
        """Return the rise in one line."""
        return f"{self.steps:,} steps of {self.shape} warm-up from {self.first:g} to {self.peak:g}"


@dataclass(frozen=True)
class WarmupLR(Schedule):
    """DeepSpeed's WarmupLR: warm-up, then constant."""

    warmup: Warmup

    def lr(self, step: int) -> float:
        """Return the learning rate of a step."""
        index = step - 1
        if index < self.warmup.steps:
            return self.warmup.lr(index)
        return self.warmup.peak

    def describe(self) -> str:
        """Return the schedule in one line."""
        return f"WarmupLR: {self.warmup.describe()}, then constant"


@dataclass(frozen=True)
class WarmupDecayLR(Schedule):
    """DeepSpeed's WarmupDecayLR: warm-up, then linear decay down to the warm-up's first learning rate."""

    warmup: Warmup
    end_step: int

    def lr(self, step: int) -> float:
        """Return the learning rate of a step."""
        index = step - 1
        if index < self.warmup.steps:
            return self.warmup.lr(index)
        left = (self.end_step - index) / max(1, self.end_step - self.warmup.steps)
        return self.warmup.first + (self.warmup.peak - self.warmup.first) * max(0.0, left)

    def describe(self) -> str:
        """Return the schedule in one line."""
        end = f"down to {self.warmup.first:g} at step {self.end_step:,}"
        return f"WarmupDecayLR: {self.warmup.describe()}, {end}"


@dataclass(frozen=True)
class WarmupCosineLR(Schedule):
    """DeepSpeed's WarmupCosineLR: warm-up, then half a cosine down to the lowest learning rate."""

    warmup: Warmup
    lowest: float
    end_step: int

    def lr(self, step: int) -> float:
        """Return the learning rate of a step."""
        index = step - 1
        if index < 0:
            return 0.0  # not the warm-up's first one, unlike the others
        if index < self.warmup.steps:
            return self.warmup.lr(index)
        progress = (index - self.warmup.steps + 1) / max(1, self.end_step - self.warmup.steps)
        return self.lowest + (self.warmup.peak - self.lowest) * half_cosine(min(1.0, progress))

    def describe(self) -> str:
        """Return the schedule in one line."""
        end = f"down to {self.lowest:g} at step {self.end_step:,}"
        return f"WarmupCosineLR: {self.warmup.describe()}, {end}"
