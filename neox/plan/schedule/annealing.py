"""Learning-rate schedules, as functions of the step: gpt-neox's two versions, and warm-up-stable-decay."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

ScheduleVersion = Literal["v2.0", "later"]
_HALF_LIFE = 0.693  # gpt-neox's rounding of ln 2


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


def _half_cosine(progress: float) -> float:
    """Return 1 at progress 0, 0 at progress 1, and half a cosine between."""
    return (math.cos(math.pi * progress) + 1.0) / 2.0


_DECAYS: Mapping[str, Callable[[float, float, float], float]] = MappingProxyType(
    {
        "constant": lambda progress, start, floor: start,
        "linear": lambda progress, start, floor: start * (1.0 - progress),
        "cosine": lambda progress, start, floor: floor + (start - floor) / 2.0 * (math.cos(math.pi * progress) + 1.0),
        "exponential": lambda progress, start, floor: start * math.exp(-_HALF_LIFE * progress),
    }
)
"""`lr_decay_style` -> function (progress, start, floor) to the learning rate after that part (0 to 1) of the decay."""

FINAL_DECAYS: Mapping[str, Callable[[float], float]] = MappingProxyType(
    {
        "exponential": lambda progress: 2.0 * 0.5**progress - 1.0,
        "linear": lambda progress: 1.0 - progress,
        "cosine": _half_cosine,
        "minus_sqrt": lambda progress: 1.0 - math.sqrt(progress),
    }
)
"""`lr_wsd_decay_style` -> function of the progress to the part of (peak - minimum) that is left."""


@dataclass(frozen=True)
class Annealing(Schedule):
    """Linear warm-up to a peak, then decay, as both versions of gpt-neox compute it.

    Attributes:
        style: Key of `_DECAYS`: the decay after the warm-up.
        start: Peak learning rate.
        minimum: Lower bound after the warm-up.
        warmup_iterations: Steps of linear warm-up; may be a fraction, as in gpt-neox.
        decay_iterations: Step at which the decay ends, warm-up included.
        version: `v2.0` is gpt-neox v2.0's formula, which decays over `decay_iterations` from the end of the warm-up and
            is constant for the last `warmup_iterations`; `later` is that of later versions, which reaches the minimum
            at `decay_iterations`.
    """

    style: str
    start: float
    minimum: float
    warmup_iterations: float
    decay_iterations: int
    version: ScheduleVersion = "later"

    def lr(self, step: int) -> float:
        """Return the learning rate of a step."""
        if self.warmup_iterations > 0 and step <= self.warmup_iterations:
            return self.start * self._warmed(step)
        return max(self._after_warmup(step), self.minimum)

    def _warmed(self, step: int) -> float:
        """Return the part of the peak in a step of the warm-up.

        Later versions do not waste the first step on a learning rate of zero. A warm-up shorter than one step would
        then exceed the peak.
        """
        if self.version == "v2.0":
            return step / self.warmup_iterations
        return min(1.0, max(1, step) / self.warmup_iterations)

    def _after_warmup(self, step: int) -> float:
        """Return the learning rate of a step after the warm-up, before the lower bound is applied.

        After the end the last value holds. The cosine of later gpt-neox versions rises again, which is a mistake.
        """
        if self.version == "v2.0":
            last_step = self.decay_iterations - self.warmup_iterations
            span = float(self.decay_iterations)
            floor = 0.0
        else:
            last_step = float(self.decay_iterations)
            span = self.decay_iterations - self.warmup_iterations
            floor = self.minimum
        done = min(step, last_step) - self.warmup_iterations
        progress = done / span if span > 0 else 1.0
        return _DECAYS[self.style](progress, self.start, floor)

    def describe(self) -> str:
        """Return the schedule in one line."""
        rise = _describe_warmup(self.warmup_iterations, self.start)
        if self.style == "constant":
            return f"{rise}, then constant"
        version = " (v2.0's form)" if self.version == "v2.0" else ""
        return f"{self.style}: {rise}, down to {self.minimum:g} at step {self.decay_iterations:,}{version}"


@dataclass(frozen=True)
class WarmupStableDecay(Annealing):
    """WSD: the peak is held after the warm-up, and only the last steps decay (arXiv:2404.06395).

    Attributes:
        final_decay: Key of `FINAL_DECAYS`: the shape of the decay (Megatron-LM's `lr_wsd_decay_style`).
        final_iterations: Steps of the decay.
    """

    final_decay: str = "exponential"
    final_iterations: int = 1

    @property
    def first_decay_step(self) -> int:
        """First step of the decay."""
        return self.decay_iterations - self.final_iterations

    def _after_warmup(self, step: int) -> float:
        progress = (step - self.first_decay_step) / self.final_iterations
        left = FINAL_DECAYS[self.final_decay](min(max(progress, 0.0), 1.0))
        return self.minimum + left * (self.start - self.minimum)

    def describe(self) -> str:
        """Return the schedule in one line."""
        rise = _describe_warmup(self.warmup_iterations, self.start)
        steps = f"from step {self.first_decay_step:,} to {self.decay_iterations:,}"
        fall = f"{self.final_decay} down to {self.minimum:g} {steps}"
        return f"WSD: {rise}, held, {fall}"


def _describe_warmup(steps: float, peak: float) -> str:
    return f"{steps:,.10g} steps of warm-up to {peak:g}"
