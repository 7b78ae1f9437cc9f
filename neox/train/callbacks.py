"""What watches a run: a callback sees steps, evaluations and checkpoints, and changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from neox.engine import SaveReport, StepResult
from neox.train.state import TrainState


@dataclass(frozen=True)
class StepReport:
    """One step as callbacks see it.

    seconds: its wall time; reading: the part of it spent waiting for data; peak_memory: bytes on this rank.
    """

    result: StepResult
    seconds: float
    samples_per_second: float
    tokens_per_second: float
    flops_per_second_per_gpu: float
    peak_memory: int
    reading: float = 0.0

    def scalars(self) -> dict[str, float]:
        """The step's numbers under the names that NeoX's users know."""
        return {
            "train/lm_loss": self.result.loss,
            "train/learning_rate": self.result.lr,
            "train/loss_scale": self.result.loss_scale,
            "train/grad_norm": self.result.grad_norm,
            "train/skipped": float(self.result.skipped),
            "runtime/samples_per_sec": self.samples_per_second,
            "runtime/tokens_per_sec": self.tokens_per_second,
            "runtime/iteration_time": self.seconds,
            "runtime/flops_per_sec_per_gpu": self.flops_per_second_per_gpu,
            "runtime/peak_memory_bytes": float(self.peak_memory),
            "timers/batch_generator": self.reading,
        }


class Callback:
    """Does nothing; subclasses override what they watch. Only rank 0 has callbacks."""

    def on_start(self, state: TrainState) -> None:
        """Before the first step."""

    def on_step(self, state: TrainState, report: StepReport) -> None:
        """After a step."""

    def on_evaluation(self, state: TrainState, name: str, scalars: Mapping[str, float]) -> None:
        """After an evaluation; name: `validation`, `test` or `tasks`."""

    def on_save(self, state: TrainState, report: SaveReport) -> None:
        """After a committed checkpoint; with `async_save` of an earlier iteration than the state's."""

    def on_end(self, state: TrainState) -> None:
        """After the last step, also when the run ends early."""

    def on_failure(self, state: TrainState) -> None:
        """In place of `on_end` when an error ends the run, maybe before `on_start` is through: bring what is there to
        an end."""


class ScalarCallback(Callback):
    """Writes the numbers of steps, evaluations and checkpoints to one place; subclasses say how."""

    def write(self, iteration: int, scalars: Mapping[str, float]) -> None:
        """Write numbers under their names, at an iteration."""
        raise NotImplementedError

    def on_step(self, state: TrainState, report: StepReport) -> None:
        self.write(state.iteration, report.scalars())

    def on_evaluation(self, state: TrainState, name: str, scalars: Mapping[str, float]) -> None:
        self.write(state.iteration, scalars)

    def on_save(self, state: TrainState, report: SaveReport) -> None:
        self.write(state.iteration, report.scalars())
