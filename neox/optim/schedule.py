"""Learning rates and betas of an optimizer's groups, set by a schedule."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from neox.plan import RunPlan
from neox.plan.schedule import Annealing, schedule_of


class LRSchedule:
    """A schedule with a position, which sets the learning rate of an optimizer's groups, and betas if it moves them.

    The position counts applied steps: a step that fp16's loss scaler skips does not advance it, as in gpt-neox.
    DeepSpeed calls `step` after each applied step and stores `state_dict` in checkpoints.
    """

    def __init__(self, plan: RunPlan, optimizer: Optimizer) -> None:
        self.schedule = schedule_of(plan.config)
        self.optimizer = optimizer
        self.cycled_betas = plan.config.optimizer.optimizer.kind.cycled_betas
        self.seek(0)

    def seek(self, iteration: int) -> None:
        """Set the position to the step after `iteration` applied ones."""
        self.iteration = iteration
        betas = self.schedule.betas(iteration)
        for group in self.optimizer.param_groups:  # looked up each time: loading replaces them
            group["lr"] = self.schedule.lr(iteration) * group.get("lr_factor", 1.0)
            if betas is not None and self.cycled_betas:
                group[self.cycled_betas] = betas

    def step(self) -> None:
        """Advance by one applied step."""
        self.seek(self.iteration + 1)

    @property
    def lr(self) -> float:
        """Learning rate of the next step, before the factors of parameter groups."""
        return self.schedule.lr(self.iteration)

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group in the next step."""
        return [group["lr"] for group in self.optimizer.param_groups]

    get_last_lr = get_lr

    def state_dict(self) -> dict[str, Any]:
        """Return the position and gpt-neox's parameters, under gpt-neox's names."""
        state: dict[str, Any] = {"num_iters": self.iteration}
        if isinstance(self.schedule, Annealing):
            state["start_lr"] = self.schedule.start
            state["min_lr"] = self.schedule.minimum
            state["warmup_iter"] = self.schedule.warmup_iterations
            state["end_iter"] = self.schedule.decay_iterations
            state["decay_style"] = self.schedule.style
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the position from `state`; the parameters stay the configuration's, which the user may have changed."""
        self.seek(int(state["num_iters"]))
