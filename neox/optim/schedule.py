"""Learning-rate schedules of both gpt-neox versions, and the scheduler that DeepSpeed steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from torch.optim import Optimizer

from neox.config import RunPlan

DecayStyle = Literal["constant", "linear", "cosine", "exponential"]
ScheduleVersion = Literal["v2.0", "later"]
_HALF_LIFE = 0.693  # gpt-neox's rounding of ln 2


@dataclass(frozen=True)
class Schedule:
    """Parameters of a learning-rate schedule.

    Attributes:
        style: Decay after warm-up.
        start: Peak learning rate.
        minimum: Lower bound after warm-up.
        warmup_iterations: Steps of linear warm-up; may be a fraction, as in gpt-neox.
        decay_iterations: Step at which decay ends, warm-up included.
        version: `v2.0` is gpt-neox v2.0's formula, which decays over `decay_iterations` from the end of warm-up and is
            constant for the last `warmup_iterations`; `later` is that of later versions, which reaches the minimum at
            `decay_iterations`.
    """

    style: DecayStyle
    start: float
    minimum: float
    warmup_iterations: float
    decay_iterations: int
    version: ScheduleVersion = "later"

    @classmethod
    def of_plan(cls, plan: RunPlan) -> Schedule:
        """Return the schedule that a plan asks for; `lr_decay_iters` defaults to `train_iters`."""
        config = plan.config.schedule
        decay_iterations = config.decay_iterations(plan.config.training.train_iters)
        return cls(
            style=config.lr_decay_style,
            start=plan.config.optimizer.optimizer.params.lr,
            minimum=config.min_lr,
            warmup_iterations=config.warmup * decay_iterations,
            decay_iterations=decay_iterations,
            version=config.lr_schedule_version,
        )

    def lr(self, iteration: int) -> float:
        """Return the learning rate of step `iteration`, counted from 0."""
        warm = self.warmup_iterations
        if warm > 0 and iteration <= warm:
            # Later versions do not waste the first step on a learning rate of zero; a warm-up shorter than one step
            # would then exceed the peak.
            return self.start * (iteration / warm if self.version == "v2.0" else min(1.0, max(1, iteration) / warm))
        if self.style == "constant":
            return max(self.start, self.minimum)
        # After the end the minimum holds (the cosine of later gpt-neox versions rises again, which is a mistake).
        step = min(iteration, self.decay_iterations - (warm if self.version == "v2.0" else 0)) - warm
        span = self.decay_iterations if self.version == "v2.0" else self.decay_iterations - warm
        progress = step / span if span > 0 else 1.0
        return max(self._decayed(progress), self.minimum)

    def _decayed(self, progress: float) -> float:
        """Return the learning rate after `progress` (0 to 1) of the decay, before the lower bound is applied."""
        if self.style == "linear":
            return self.start * (1.0 - progress)
        if self.style == "exponential":
            return self.start * math.exp(-_HALF_LIFE * progress)
        floor = 0.0 if self.version == "v2.0" else self.minimum
        return floor + (self.start - floor) / 2.0 * (math.cos(math.pi * progress) + 1.0)


class LRSchedule:
    """A schedule with a position, which sets the learning rate of an optimizer's groups.

    The position counts applied steps: a step that fp16's loss scaler skips does not advance it, as in gpt-neox.
    DeepSpeed calls `step` after each applied step and stores `state_dict` in checkpoints.
    """

    def __init__(self, plan: RunPlan, optimizer: Optimizer) -> None:
        self.schedule = Schedule.of_plan(plan)
        self.optimizer = optimizer
        self.seek(0)

    def seek(self, iteration: int) -> None:
        """Set the position to the step after `iteration` applied ones."""
        self.iteration = iteration
        for group in self.optimizer.param_groups:  # looked up each time: loading replaces them
            group["lr"] = self.schedule.lr(iteration) * group.get("lr_factor", 1.0)

    def step(self) -> None:
        """Advance by one applied step."""
        self.seek(self.iteration + 1)

    def get_lr(self) -> list[float]:
        """Return the learning rate of the next step, once per parameter group."""
        return [self.schedule.lr(self.iteration)] * len(self.optimizer.param_groups)

    get_last_lr = get_lr

    def state_dict(self) -> dict[str, Any]:
        """Return the position and the parameters, under gpt-neox's names."""
        s = self.schedule
        return {
            "num_iters": self.iteration,
            "start_lr": s.start,
            "min_lr": s.minimum,
            "warmup_iter": s.warmup_iterations,
            "end_iter": s.decay_iterations,
            "decay_style": s.style,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the position from `state`; the parameters stay the configuration's, which the user may have changed."""
        self.seek(int(state["num_iters"]))
