"""Loss spikes: losses far above those of the last steps, after which a run may go back and skip what it has read.

The rule of going back and skipping is PaLM's (arXiv:2204.02311, section 5.1), where humans applied it.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median

from neox.data.build import DataIterators
from neox.data.ledger import after_skipping
from neox.engine import Engine, roll_back
from neox.errors import ConfigError
from neox.launch import record_run_event
from neox.log import get_logger
from neox.plan import RunPlan

_log = get_logger(__name__)
_NORMAL = 1.4826  # standard deviation of a normal distribution over its median distance from the median
_LEAST_DEVIATION = 1e-3  # of the median: successive losses of a tiny run may be almost equal


@dataclass(frozen=True)
class Spike:
    """A loss spike.

    Attributes:
        step: Its step, counted from 1.
        loss: The loss, reduced over micro batches and data ranks.
        median: Median of the last losses.
        limit: Loss above which a step is a spike.
    """

    step: int
    loss: float
    median: float
    limit: float


class LossBand:
    """Robust band of the last losses.

    Args:
        factor: Deviations above the median at which the band ends.
        window: Number of losses.
    """

    def __init__(self, factor: float, window: int) -> None:
        self.factor = factor
        self._losses: deque[float] = deque(maxlen=window)

    def judge(self, loss: float, step: int) -> Spike | None:
        """Take the loss of a step, and return whether it is a spike.

        A spike becomes one of the last losses as well, so that a loss that stays high is soon no spike any more.
        """
        spike = None
        if len(self._losses) == self._losses.maxlen and not math.isnan(loss):
            middle = median(self._losses)
            distance = median(abs(other - middle) for other in self._losses)
            deviation = max(_NORMAL * distance, _LEAST_DEVIATION * abs(middle))
            limit = middle + self.factor * deviation
            if loss > limit:
                spike = Spike(step, loss, middle, limit)
        if math.isfinite(loss):
            self._losses.append(loss)
        return spike


class LossSpikes:
    """What a run does about its loss spikes.

    Args:
        plan: The run.

    Attributes:
        found: The spike of the last step; None if it was none.
    """

    def __init__(self, plan: RunPlan) -> None:
        keys = plan.config.healing
        self.found: Spike | None = None
        self.wants_rollback = keys.loss_spike_action == "rollback"
        self._most = keys.loss_spike_max_rollbacks
        self._band: LossBand | None = None
        if keys.loss_spike_action != "off":
            self._band = LossBand(keys.loss_spike_factor, keys.loss_spike_window)

    def judge(self, loss: float, step: int) -> None:
        """Judge the loss of a step. With `warn`, a spike is reported at once."""
        if self._band is None:
            return
        self.found = self._band.judge(loss, step)
        if self.found is not None and not self.wants_rollback:
            self._report("no rollback: loss_spike_action is warn")

    def roll_back(self, engine: Engine, data: DataIterators, step: int) -> bool:
        """Let the engine go back before a step, and set its ledger so that the batches in between are skipped.

        All ranks call it together.

        Args:
            engine: The engine.
            data: Its data.
            step: The step of the spike.

        Returns:
            Whether there was a checkpoint to go back to, and the run may go back once more.

        Raises:
            ConfigError: If what was read of the data is not recorded, so that nothing can be skipped.
        """
        if data.ledger_at is None:
            raise ConfigError(
                "loss_spike_action: rollback needs joined documents: samples of these data are not counted"
            )
        skipped = engine.skipped
        if len(skipped) >= self._most:
            self._report(f"no rollback: the run has gone back {len(skipped)} times (loss_spike_max_rollbacks)")
            return False
        iteration = roll_back(engine, step)
        if iteration is None:
            self._report("no rollback: there is no checkpoint before it")
            return False
        engine.ledger = after_skipping(data.ledger_at(iteration), data.ledger_at(step))
        engine.skipped = (*skipped, (iteration + 1, step))
        self._report(f"back to step {iteration}; the batches of steps {iteration + 1} to {step} are skipped")
        return True

    def _report(self, decision: str) -> None:
        """Log a spike, and record it as an event of the run."""
        spike = self.found
        if spike is None:  # another rank found it
            return
        found = f"loss {spike.loss:.4g} at step {spike.step}, above {spike.limit:.4g} (median {spike.median:.4g})"
        _log.warning("loss spike: %s: %s", found, decision)
        record_run_event("loss spike", step=spike.step, cause=found, decision=decision)
