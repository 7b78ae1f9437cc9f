"""The record of what was read of each dataset, which checkpoints carry and from which a resumed run reads on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from neox.checkpoint import LEDGER
from neox.data.mixtures.ledger import after_skipping
from neox.data.run_data import DataIterators
from neox.engine import Engine, Feature, RunStart, TrainedModel
from neox.engine.feature import DataArguments
from neox.errors import ConfigError
from neox.log import get_logger

_log = get_logger(__name__)


def build(model: TrainedModel, start: RunStart) -> Ledger:
    """Return the record."""
    return Ledger()


class Ledger(Feature):
    """Record of what was read of each dataset.

    Attributes:
        record: The record with which the data is opened; None if the run starts at iteration 0, or there is none.
    """

    def __init__(self) -> None:
        self.record: Mapping[str, Any] | None = None
        self._at: Callable[[int], Mapping[str, Any]] | None = None

    def load(self, engine: Engine, start: RunStart) -> None:
        """Take the record of the checkpoint."""
        self.record = start.saved.get(LEDGER)

    def opening_data(self, engine: Engine) -> DataArguments:
        """Let the data resume after the samples that were read."""
        self._warn_of_other_samples(engine)
        return {"ledger": self.record}

    def on_data(self, engine: Engine, data: DataIterators) -> None:
        """Keep the function that maps a number of steps to the record."""
        self._at = data.ledger_at

    def state(self, engine: Engine) -> Mapping[str, Any]:
        """Return the record at the engine's iteration; none for data whose samples are not counted."""
        if self._at is None:
            return {}
        return {LEDGER: self._at(engine.iteration)}

    def allows_rollback(self, engine: Engine, step: int) -> bool:
        """Return True. Raises ConfigError if the samples are not counted, so that they cannot be skipped."""
        if self._at is None:
            raise ConfigError(
                "loss_spike_action: rollback needs samples of joined documents: the samples of this kind of data are "
                "not counted, so they cannot be skipped"
            )
        return True

    def after_rollback(self, engine: Engine, back_to: int | None, step: int) -> None:
        """Let the data resume after the step, whose samples and those before it are skipped."""
        if back_to is None or self._at is None:
            return
        self.record = after_skipping(self._at(back_to), self._at(step))

    def _warn_of_other_samples(self, engine: Engine) -> None:
        """Warn if a resumed run has read other samples than it would have with this batch, and no record says which."""
        read = engine.deepspeed_engine.global_samples
        expected = engine.plan.batch_schedule.samples(engine.iteration)
        if read in (0, expected) or self.record is not None:  # 0: counters were not loaded
            return
        _log.warning(
            "the checkpoint has seen %d samples in %d iterations, and this batch means %d: %d samples are %s",
            read,
            engine.iteration,
            expected,
            abs(read - expected),
            "skipped" if expected > read else "read again",
        )
