"""The rule for losses and gradient norms that are not finite: skipped and counted, then an end."""

from __future__ import annotations

import math

from neox.engine import StepResult
from neox.errors import TrainingError


class NonFiniteRule:
    """Counts steps in a row whose loss or gradient norm is not finite; more than `allowed` of them end the run.

    Such a step leaves the weights alone. A step that fp16's loss scale skips while it shrinks does not count, as long
    as its loss is finite: the loss does not depend on the scale.
    """

    def __init__(self, allowed: int, dynamic_loss_scale: bool) -> None:
        self.allowed = allowed
        self.dynamic_loss_scale = dynamic_loss_scale
        self.in_a_row = 0

    def counts(self, result: StepResult) -> bool:
        """Whether the step counts as not finite; call once a step."""
        finite_norm = math.isfinite(result.grad_norm) or self._scale_is_shrinking(result)
        bad = not (math.isfinite(result.loss) and finite_norm)
        self.in_a_row = self.in_a_row + 1 if bad else 0
        return bad

    def enforce(self, result: StepResult, iteration: int) -> None:
        """After `counts`: raise TrainingError when there were too many in a row, or when the step was applied."""
        if self.in_a_row == 0:
            return
        found = f"iteration {iteration}: loss {result.loss}, gradient norm {result.grad_norm}"
        if not result.skipped:
            raise TrainingError(f"{found}: not finite, and the step was applied; go back to the last checkpoint")
        if self.in_a_row > self.allowed:
            raise TrainingError(
                f"{found}: not finite, {self.in_a_row} such steps in a row, max_nonfinite_steps is {self.allowed}; the "
                "weights are as before these steps. Look at the data of this step, lower the learning rate, clip "
                "gradients, or allow more such steps"
            )

    def _scale_is_shrinking(self, result: StepResult) -> bool:
        return self.dynamic_loss_scale and result.skipped and result.loss_scale > 1.0
