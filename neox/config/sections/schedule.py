"""The learning-rate schedule."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from neox.config.sections.base import OnlyWith, Section


class ScheduleConfig(Section):
    """Warm-up, then decay from the peak (`optimizer.params.lr`) to min_lr."""

    lr_decay_style: Literal["constant", "linear", "cosine", "exponential"] = "linear"
    """Shape of the decay."""

    lr_decay_iters: int | None = Field(None, ge=1)
    """Iterations the decay takes; train_iters where unset."""

    lr_decay_fraction: float | None = Field(None, gt=0, le=1)
    """lr_decay_iters as a part of train_iters."""

    min_lr: Annotated[float, OnlyWith("lr_decay_style", ("linear", "cosine", "exponential"))] = Field(0.0, ge=0)
    """The learning rate never falls below this."""

    warmup: float = Field(0.01, ge=0, le=1)
    """Part of lr_decay_iters spent warming up linearly from 0."""

    lr_schedule_version: Literal["v2.0", "later"] = "later"
    """Which of gpt-neox's two forms: `v2.0` starts at 0 and is constant for the last warm-up length; `later` starts at
    peak / warm-up steps and reaches min_lr at the end. Use `v2.0` to resume or repeat an old run."""

    def decay_iterations(self, train_iters: int | None) -> int:
        """Return the iterations the decay takes: lr_decay_iters, or lr_decay_fraction of train_iters, or all of it."""
        if self.lr_decay_iters is not None:
            return self.lr_decay_iters
        fraction = 1.0 if self.lr_decay_fraction is None else self.lr_decay_fraction
        return max(1, round(fraction * (train_iters or 0)))
