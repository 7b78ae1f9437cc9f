"""Detection of loss spikes, and rollback to a checkpoint before the spike, after which its batches are skipped.

PaLM's authors did the same by hand (arXiv:2204.02311, section 5.1).

A spike at step 500 with `loss_spike_action: rollback`, and a checkpoint at 400. All of it is in
`Trainer._has_rolled_back`, after the update of step 500 and its report:

    LossSpikes.wants_rollback     `LossBand.judge`: is the loss above median + factor x deviation of the last losses?
    Engine.any_rank               one rank that says so is enough
    BackgroundSaves.wait          a save that is under way ends first
    Ledger.allows_rollback        can samples be skipped?
    LossSpikes.allows_rollback    no, after loss_spike_max_rollbacks
    loading.roll_back             rank 0 chooses the newest checkpoint before 500 (`run_start.start_before`), that of
                                  400; later ones move to `superseded/`. Weights, optimizer, learning rate and counters
                                  are loaded, then every feature's state: the average of weights, the ledger and the
                                  losses in the band are those of step 400
    Ledger.after_rollback         the data resumes behind the samples of step 500
    LossSpikes.after_rollback     steps 401 to 500 are noted as skipped, and reported
    Trainer._open_data            opened anew, so that step 401 reads what step 501 would have read; then every
                                  feature's `on_data`
    Trainer.save                  the checkpoint of 400 again, which now knows what is skipped; a resume skips it too

Training resumes with step 401.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from neox.checkpoint import LAST_LOSSES, SKIPPED
from neox.engine import Engine, Feature, RunStart, StepReport, TrainedModel, TrainState
from neox.launch import record_run_event
from neox.log import get_logger
from neox.plan import RunPlan

_log = get_logger(__name__)
_DEVIATION_RATIO = 1.4826  # a normal distribution's standard deviation, divided by its median absolute deviation
_MIN_DEVIATION = 1e-3  # relative to the median, because successive losses of a tiny run may be almost equal


@dataclass(frozen=True)
class Spike:
    """A loss spike.

    Attributes:
        step: Its step, counted from 1.
        loss: The loss, reduced over micro batches and data ranks.
        median: Median of the previous losses.
        limit: Loss above which a step counts as a spike.
    """

    step: int
    loss: float
    median: float
    limit: float


class LossBand:
    """Band of normal losses, from the median and the median absolute deviation of the last losses.

    Args:
        factor: Upper end of the band, in deviations above the median.
        window: Number of losses.
        losses: Losses of the last steps in order; the window takes the newest.
    """

    def __init__(self, factor: float, window: int, losses: Iterable[float] = ()) -> None:
        self.factor = factor
        self._losses: deque[float] = deque(losses, maxlen=window)

    @property
    def losses(self) -> tuple[float, ...]:
        """The losses in the window, in the order of steps."""
        return tuple(self._losses)

    def judge(self, loss: float | None, step: int) -> Spike | None:
        """Add the loss of a step to the window, if it is finite. Return a spike if the loss is one, otherwise None.

        A step without labels has no loss. A spike enters the window too, so a loss that stays high soon becomes the new
        normal.
        """
        if loss is None:
            return None
        spike = None
        if len(self._losses) == self._losses.maxlen and not math.isnan(loss):
            middle = median(self._losses)
            absolute_deviation = median(abs(other - middle) for other in self._losses)
            deviation = max(_DEVIATION_RATIO * absolute_deviation, _MIN_DEVIATION * abs(middle))
            limit = middle + self.factor * deviation
            if loss > limit:
                spike = Spike(step, loss, middle, limit)
        if math.isfinite(loss):
            self._losses.append(loss)
        return spike


def build(model: TrainedModel, start: RunStart) -> LossSpikes | None:
    """Return the detection; None with `loss_spike_action: off`, unless the run has skipped batches before."""
    if model.plan.config.healing.loss_spike_action == "off" and SKIPPED not in start.saved:
        return None
    return LossSpikes(model.plan)


class LossSpikes(Feature):
    """Detection of loss spikes in a run, and the reaction to them, in the order above.

    Args:
        plan: The run.

    Attributes:
        skipped_batches: First and last step of each range whose batches were skipped.
        may_roll_back: Whether the run is rolled back after a spike.
    """

    def __init__(self, plan: RunPlan) -> None:
        self._keys = plan.config.healing
        self._looks_for_spikes = self._keys.loss_spike_action != "off"  # else it only keeps what was skipped
        self.may_roll_back = self._keys.loss_spike_action == "rollback"
        self.skipped_batches: tuple[tuple[int, int], ...] = ()
        self._skipped_before: tuple[tuple[int, int], ...] = ()  # before the last rollback
        self._spike: Spike | None = None  # at the last step, if this rank saw one
        self._band = LossBand(self._keys.loss_spike_factor, self._keys.loss_spike_window)

    def load(self, engine: Engine, start: RunStart) -> None:
        """Take the ranges that were skipped, and the losses of the run's own checkpoint: other data has other ones."""
        self.skipped_batches = tuple((first, last) for first, last in start.saved.get(SKIPPED, ()))
        losses: Sequence[float] = ()
        if start.own_directory and self._looks_for_spikes:
            losses = start.saved.get(LAST_LOSSES, ())
        self._band = LossBand(self._keys.loss_spike_factor, self._keys.loss_spike_window, losses)

    def state(self, engine: Engine) -> Mapping[str, Any]:
        """Return the skipped ranges, and the losses with which the next ones are compared."""
        saved: dict[str, Any] = {}
        if self.skipped_batches:
            saved[SKIPPED] = [list(steps) for steps in self.skipped_batches]
        if self._band.losses:
            saved[LAST_LOSSES] = list(self._band.losses)
        return saved

    def wants_rollback(self, state: TrainState, report: StepReport) -> bool:
        """Return whether the loss of a step is a spike. With `loss_spike_action: warn` only report it."""
        if not self._looks_for_spikes:
            return False
        self._spike = self._band.judge(report.result.loss, state.iteration)
        if self._spike is not None and not self.may_roll_back:
            self._report("no rollback: loss_spike_action is warn")
            return False
        return self._spike is not None

    def allows_rollback(self, engine: Engine, step: int) -> bool:
        """Return whether there were fewer than `loss_spike_max_rollbacks` rollbacks."""
        self._skipped_before = self.skipped_batches
        if len(self.skipped_batches) < self._keys.loss_spike_max_rollbacks:
            return True
        count = len(self.skipped_batches)
        self._report(f"no rollback: the run was rolled back {count} times (loss_spike_max_rollbacks)")
        return False

    def after_rollback(self, engine: Engine, back_to: int | None, step: int) -> None:
        """Remember what is skipped from here on, besides what was skipped before."""
        if back_to is None:
            self._report("no rollback: there is no checkpoint before the spike")
            return
        self.skipped_batches = (*self._skipped_before, (back_to + 1, step))
        decision = f"back to step {back_to}; the batches of steps {back_to + 1} to {step} are skipped"
        self._report(decision, back_to=back_to)

    def _report(self, decision: str, back_to: int | None = None) -> None:
        """Log a spike, and record it as an event of the run.

        Args:
            decision: What is done about it.
            back_to: Step of the checkpoint that the run goes back to; None without a rollback.
        """
        spike = self._spike
        if spike is None:  # another rank found it
            return
        cause = f"loss {spike.loss:.4g} at step {spike.step}, above {spike.limit:.4g} (median {spike.median:.4g})"
        _log.warning("loss spike: %s: %s", cause, decision)
        record_run_event("loss spike", step=spike.step, cause=cause, decision=decision, back_to=back_to)
