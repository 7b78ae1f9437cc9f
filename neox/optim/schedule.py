"""The schedule of a run, applied to its optimizer."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from neox.plan import RunPlan
from neox.plan.schedule import schedule_of


class LRSchedule:
    """Sets the learning rate of an optimizer's groups for the next step, and their betas if the schedule cycles them.

    Iterations are applied steps: a step that fp16's loss scaler skips does not count, as in gpt-neox. DeepSpeed calls
    `step` after each applied step and stores `state_dict` in checkpoints.
    """

    def __init__(self, plan: RunPlan, optimizer: Optimizer) -> None:
        self.schedule = schedule_of(plan.config)
        self.optimizer = optimizer
        self.cycled_betas = plan.config.optimizer.optimizer.kind.cycled_betas
        self.seek(0)

    def seek(self, iteration: int) -> None:
        """Prepare the optimizer for the step after `iteration` applied ones."""
        self.iteration = iteration
        betas = self.schedule.betas(iteration)
        for group in self.optimizer.param_groups:  # looked up each time: loading replaces them
            group["lr"] = self.lr * group.get("lr_factor", 1.0)
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
        """Return the iteration, and the schedule's numbers for a reader, under gpt-neox's names."""
        return {"num_iters": self.iteration, **self.schedule.saved_numbers()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the saved iteration. The numbers stay the configuration's, which the user may have changed."""
        self.seek(int(state["num_iters"]))
