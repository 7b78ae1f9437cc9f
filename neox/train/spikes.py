"""Detection of loss spikes, and rollback to a checkpoint before the spike, after which its batches are skipped.

PaLM's authors did the same by hand (arXiv:2204.02311, section 5.1).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from neox.data.mixtures.ledger import after_skipping
from neox.data.run_data import DataIterators
from neox.engine import Engine, roll_back
from neox.errors import ConfigError
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
        losses: Losses of the last steps in order, of which as many are taken as the window holds.
    """

    def __init__(self, factor: float, window: int, losses: Iterable[float] = ()) -> None:
        self.factor = factor
        self._losses: deque[float] = deque(losses, maxlen=window)

    @property
    def losses(self) -> tuple[float, ...]:
        """The losses in the window, in the order of steps."""
        return tuple(self._losses)

    def judge(self, loss: float, step: int) -> Spike | None:
        """Add the loss of a step to the window. Return a spike if the loss is one, otherwise None.

        A spike enters the window too, so a loss that stays high soon becomes the new normal.
        """
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


class LossSpikes:
    """Detection of loss spikes in a run, and the reaction to them.

    Args:
        plan: The run.
        losses: Losses of the last steps before the start, in order.

    Attributes:
        spike: The spike at the last step; None if there was none.
        wants_rollback: Whether the run is rolled back after a spike.
    """

    def __init__(self, plan: RunPlan, losses: Iterable[float] = ()) -> None:
        self._keys = plan.config.healing
        self.spike: Spike | None = None
        self.wants_rollback = self._keys.loss_spike_action == "rollback"
        self._band = self._band_of(losses)

    def _band_of(self, losses: Iterable[float]) -> LossBand | None:
        """Return the band of normal losses after some losses; None with `loss_spike_action: off`."""
        if self._keys.loss_spike_action == "off":
            return None
        return LossBand(self._keys.loss_spike_factor, self._keys.loss_spike_window, losses)

    @property
    def last_losses(self) -> tuple[float, ...]:
        """Losses of the last steps with which the next one is compared, in order; none if spikes are not looked for."""
        if self._band is None:
            return ()
        return self._band.losses

    def judge(self, loss: float, step: int) -> None:
        """Check the loss of a step for a spike. With `loss_spike_action: warn` report it at once."""
        if self._band is None:
            return
        self.spike = self._band.judge(loss, step)
        if self.spike is not None and not self.wants_rollback:
            self._report("no rollback: loss_spike_action is warn")

    def roll_back(self, engine: Engine, data: DataIterators, step: int) -> bool:
        """Load the newest checkpoint before a spike, and skip the batches from there to the spike.

        All ranks call it together.

        Args:
            engine: The engine.
            data: Data iterators of the run.
            step: The step of the spike.

        Returns:
            Whether the run was rolled back; False if there is no checkpoint to load, or after
            `loss_spike_max_rollbacks` rollbacks.

        Raises:
            ConfigError: The data has no ledger of the samples that were read, so they cannot be skipped.
        """
        if data.ledger_at is None:
            raise ConfigError(
                "loss_spike_action: rollback needs samples of joined documents: the samples of this kind of data are "
                "not counted, so they cannot be skipped"
            )
        skipped = engine.skipped
        if len(skipped) >= self._keys.loss_spike_max_rollbacks:
            self._report(f"no rollback: the run was rolled back {len(skipped)} times (loss_spike_max_rollbacks)")
            return False
        iteration = roll_back(engine, step)
        if iteration is None:
            self._report("no rollback: there is no checkpoint before the spike")
            return False
        engine.ledger = after_skipping(data.ledger_at(iteration), data.ledger_at(step))
        engine.skipped = (*skipped, (iteration + 1, step))
        self._band = self._band_of(engine.last_losses)  # of the checkpoint, so without the spike
        decision = f"back to step {iteration}; the batches of steps {iteration + 1} to {step} are skipped"
        self._report(decision, back_to=iteration)
        return True

    def _report(self, decision: str, back_to: int | None = None) -> None:
        """Log a spike, and record it as an event of the run.

        Args:
            decision: What is done about it.
            back_to: Step of the checkpoint that the run goes back to; None without a rollback.
        """
        spike = self.spike
        if spike is None:  # another rank found it
            return
        cause = f"loss {spike.loss:.4g} at step {spike.step}, above {spike.limit:.4g} (median {spike.median:.4g})"
        _log.warning("loss spike: %s: %s", cause, decision)
        record_run_event("loss spike", step=spike.step, cause=cause, decision=decision, back_to=back_to)
