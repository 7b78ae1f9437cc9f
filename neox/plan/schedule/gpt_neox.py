"""gpt-neox's learning-rate schedules: warm-up and decay in two versions, and warm-up-stable-decay."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

_HALF_LIFE = 0.693  # gpt-neox's rounding of ln 2


class Schedule(ABC):
    """Learning rate of each step, counted from 0 without the steps that fp16's loss scaler skips."""

    @abstractmethod
    def lr(self, step: int) -> float:
        """Return the learning rate of a step."""

    def betas(self, step: int) -> tuple[float, float] | None:
        """Return the optimizer's betas in a step; None for those of the configuration."""
        return None

    @abstractmethod
    def describe(self) -> str:
        """Return the schedule in one line."""

    def saved_numbers(self) -> dict[str, Any]:
        """Return the numbers that a checkpoint stores for a reader, under gpt-neox's names."""
        return {}


def half_cosine(progress: float) -> float:
    """Return 1 at progress 0, 0 at progress 1, and half a cosine between."""
    return (1.0 + math.cos(math.pi * progress)) / 2.0


DECAYS: Mapping[str, Callable[[float, float, float], float]] = MappingProxyType(
    {
        "constant": lambda progress, peak, lowest: peak,
        "linear": lambda progress, peak, lowest: peak * (1.0 - progress),
        "cosine": lambda progress, peak, lowest: lowest + (peak - lowest) * half_cosine(progress),
        "exponential": lambda progress, peak, lowest: peak * math.exp(-_HALF_LIFE * progress),
    }
)
"""`lr_decay_style` -> function (progress from 0 to 1, peak, lowest) to the learning rate.

Only the cosine ends at `lowest` by itself. The linear decay ends at 0, the exponential one at half of the peak; where
they fall below `lowest`, `lowest` holds.
"""

FINAL_DECAYS: Mapping[str, Callable[[float], float]] = MappingProxyType(
    {
        "exponential": lambda progress: 2.0 * 0.5**progress - 1.0,
        "linear": lambda progress: 1.0 - progress,
        "cosine": half_cosine,
        "minus_sqrt": lambda progress: 1.0 - math.sqrt(progress),
    }
)
"""`lr_wsd_decay_style` -> function of the progress (0 to 1) to the fraction of (peak - lowest) that is left."""

ScheduleVersion = Literal["v2.0", "later"]


@dataclass(frozen=True)
class VersionFormulas:
    """One version of gpt-neox's formulas.

    Attributes:
        warmup: Function (step, warmup steps) to the fraction of the peak in a step of the warm-up.
        progress: Function (step, warmup steps, end step) to the progress of the decay in a later step.
        cosine_ends_at_lowest: Whether the cosine's end is the lowest learning rate; otherwise it is 0.
    """

    warmup: Callable[[int, float], float]
    progress: Callable[[int, float, int], float]
    cosine_ends_at_lowest: bool


VERSIONS: Mapping[ScheduleVersion, VersionFormulas] = MappingProxyType(
    {
        # Starts at 0. The decay is spread over `end` steps, but stops one warm-up length before `end`.
        "v2.0": VersionFormulas(
            warmup=lambda step, warmup: step / warmup,
            progress=lambda step, warmup, end: (min(step, end - warmup) - warmup) / end,
            cosine_ends_at_lowest=False,
        ),
        # Starts at 1 / warmup; `min` guards a warm-up shorter than one step. The decay ends at `end`, and its last
        # value holds. (gpt-neox lets the cosine rise again after `end`; not reproduced.)
        "later": VersionFormulas(
            warmup=lambda step, warmup: min(1.0, max(1, step) / warmup),
            progress=lambda step, warmup, end: (min(step, end) - warmup) / (end - warmup) if end > warmup else 1.0,
            cosine_ends_at_lowest=True,
        ),
    }
)
"""`lr_schedule_version` -> formulas."""


@dataclass(frozen=True)
class Annealing(Schedule):
    r"""Linear warm-up to a peak, then decay.

        peak     _ _ _ /\
                      /   `-.
        lowest  _ _  /_ _ _ _`-._________
                    0  warmup   end_step

    Attributes:
        style: Key of `DECAYS`.
        peak: Learning rate after the warm-up.
        lowest: Lower bound after the warm-up.
        warmup_steps: Steps of the warm-up; may be a fraction, as in gpt-neox.
        end_step: Step at which the decay ends, warm-up included.
        version: Key of `VERSIONS`.
    """

    style: str
    peak: float
    lowest: float
    warmup_steps: float
    end_step: int
    version: ScheduleVersion = "later"

    def lr(self, step: int) -> float:
        """Return the learning rate of a step."""
        version = VERSIONS[self.version]
        if step <= self.warmup_steps and self.warmup_steps > 0:
            return self.peak * version.warmup(step, self.warmup_steps)
        progress = version.progress(step, self.warmup_steps, self.end_step)
        cosine_end = self.lowest if version.cosine_ends_at_lowest else 0.0
        return max(DECAYS[self.style](progress, self.peak, cosine_end), self.lowest)

    def describe(self) -> str:
        """Return the schedule in one line."""
        rise = f"{self.warmup_steps:,.10g} steps of warm-up to {self.peak:g}"
        if self.style == "constant":
            return f"{rise}, then constant"
        version = " (v2.0's form)" if self.version == "v2.0" else ""
        return f"{self.style}: {rise}, down to {self.lowest:g} at step {self.end_step:,}{version}"

    def saved_numbers(self) -> dict[str, Any]:
        """Return the numbers under gpt-neox's names."""
        return _numbers_of_gpt_neox(self, self.style)


@dataclass(frozen=True)
class WarmupStableDecay(Schedule):
    r"""WSD: the peak is held after the warm-up, and only the last steps decay (arXiv:2404.06395).

        peak     _ _ _ /-----------\
                      /             `.
        lowest  _ _  /_ _ _ _ _ _ _ _ `._________
                    0  warmup           end_step
                                   <---> decay_steps

    Attributes:
        decay: Key of `FINAL_DECAYS`.
        peak: Learning rate after the warm-up.
        lowest: Learning rate at the end.
        warmup_steps: Steps of the warm-up; may be a fraction.
        decay_steps: Steps of the decay.
        end_step: Step at which the decay ends.
        version: Key of `VERSIONS`, for the warm-up.
    """

    decay: str
    peak: float
    lowest: float
    warmup_steps: float
    decay_steps: int
    end_step: int
    version: ScheduleVersion = "later"

    @property
    def first_decay_step(self) -> int:
        """First step of the decay."""
        return self.end_step - self.decay_steps

    def lr(self, step: int) -> float:
        """Return the learning rate of a step."""
        if step <= self.warmup_steps and self.warmup_steps > 0:
            return self.peak * VERSIONS[self.version].warmup(step, self.warmup_steps)
        progress = (step - self.first_decay_step) / self.decay_steps  # below 0 while the peak is held
        left = FINAL_DECAYS[self.decay](min(max(progress, 0.0), 1.0))
        return max(self.lowest + left * (self.peak - self.lowest), self.lowest)

    def describe(self) -> str:
        """Return the schedule in one line."""
        rise = f"{self.warmup_steps:,.10g} steps of warm-up to {self.peak:g}"
        fall = f"{self.decay} down to {self.lowest:g} from step {self.first_decay_step:,} to {self.end_step:,}"
        return f"WSD: {rise}, held, {fall}"

    def saved_numbers(self) -> dict[str, Any]:
        """Return the numbers under gpt-neox's names."""
        return _numbers_of_gpt_neox(self, "WSD")


def _numbers_of_gpt_neox(schedule: Annealing | WarmupStableDecay, style: str) -> dict[str, Any]:
    """Return the numbers of a schedule under the names that gpt-neox stores them by."""
    return {
        "start_lr": schedule.peak,
        "min_lr": schedule.lowest,
        "warmup_iter": schedule.warmup_steps,
        "end_iter": schedule.end_step,
        "decay_style": style,
    }
