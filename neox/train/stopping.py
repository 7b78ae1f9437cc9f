"""Conditions that end training early: signals, and losses or gradient norms that are not finite."""

from __future__ import annotations

import math
import signal
from types import FrameType

from neox.engine import StepResult
from neox.errors import NotFiniteError
from neox.launch import acknowledge_stop
from neox.log import get_logger

_log = get_logger(__name__)
_EXIT_CODES = {signal.SIGTERM: 0, signal.SIGINT: 130}


class StopSignals:
    """Context manager that remembers the first SIGTERM or SIGINT. A second one has its default effect.

    The former handlers are restored at the end. If another rank's signal ends the training, that of this rank may still
    be on its way: it is then only answered.

    Attributes:
        received: The first signal; None if there was none.
        elsewhere: Whether another rank's signal ends the training.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self.elsewhere = False
        self._former: dict[signal.Signals, signal.Handlers] = {}

    def __enter__(self) -> StopSignals:
        for signum in _EXIT_CODES:
            self._former[signum] = signal.signal(signum, self._remember)  # type: ignore[assignment]
        return self

    def __exit__(self, *_: object) -> None:
        is_on_its_way = self.elsewhere and self.received is None
        for signum, handler in self._former.items():
            signal.signal(signum, _answer if is_on_its_way else handler)

    @property
    def exit_code(self) -> int:
        """The process's exit status after a clean end: 0 for SIGTERM (what a scheduler sends), 130 for Ctrl-C."""
        if self.received is None:
            return 0
        return _EXIT_CODES[self.received]

    def _remember(self, signum: int, frame: FrameType | None) -> None:
        if self.received is not None:
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)
            return
        self.received = signal.Signals(signum)
        acknowledge_stop()  # the launcher leaves time to save to ranks that call this
        _log.warning("%s: ending after this step; send it again to end at once", self.received.name)


def _answer(signum: int, frame: FrameType | None) -> None:
    """Answer a signal for what this process does anyway."""
    acknowledge_stop()


def ignore_signals() -> None:
    """Ignore SIGTERM and SIGINT from here on: this process is about to end by itself, with an exit code of its own."""
    for signum in _EXIT_CODES:
        signal.signal(signum, signal.SIG_IGN)


class NonFiniteRule:
    """Limit on successive steps whose loss or gradient norm is not finite.

    Such a step does not change the weights. A step that fp16's loss scale skips while it shrinks does not count, as
    long as its loss is finite: the loss does not depend on the scale.

    Args:
        allowed: Number of successive steps after which training continues (`max_nonfinite_steps`).
        dynamic_loss_scale: Whether the loss scale may shrink: in fp16, unless `fp16.loss_scale` fixes it.
    """

    def __init__(self, allowed: int, dynamic_loss_scale: bool) -> None:
        self.allowed = allowed
        self.dynamic_loss_scale = dynamic_loss_scale
        self.in_a_row = 0

    def counts(self, result: StepResult) -> bool:
        """Return whether the step counts as not finite; call once a step."""
        is_scale_shrinking = self.dynamic_loss_scale and result.update_skipped and result.loss_scale > 1.0
        finite_norm = math.isfinite(result.grad_norm) or is_scale_shrinking
        finite_loss = result.loss is None or math.isfinite(result.loss)  # None: a step without labels
        bad = not (finite_loss and finite_norm)
        self.in_a_row = self.in_a_row + 1 if bad else 0
        return bad

    def enforce(self, result: StepResult, iteration: int) -> None:
        """Check the limit, after `counts`.

        Raises:
            NotFiniteError: If there were more successive steps than allowed, or the step changed the weights.
        """
        if self.in_a_row == 0:
            return
        found = f"iteration {iteration}: loss {result.loss}, gradient norm {result.grad_norm}"
        if not result.update_skipped:
            raise NotFiniteError(
                f"{found}: not finite, and the step was applied; go back to the last checkpoint", iteration
            )
        if self.in_a_row > self.allowed:
            scale = ""
            if result.loss_scale > 1.0 and not self.dynamic_loss_scale:
                scale = f"lower fp16.loss_scale ({result.loss_scale:g}), or make it dynamic (0); otherwise "
            raise NotFiniteError(
                f"{found}: not finite, {self.in_a_row} such steps in a row, max_nonfinite_steps is {self.allowed}; the "
                f"weights are as before these steps. To go on, {scale}look at the data of this step, lower the "
                "learning rate, clip gradients, or allow more such steps",
                iteration,
            )
