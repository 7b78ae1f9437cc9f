"""Callbacks of the training loop: their base class, and what they are told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from neox.engine import SaveReport, StepResult


@dataclass
class TrainState:
    """Progress of one process's training.

    Attributes:
        iteration: Completed steps, counted from 1 over all resumes.
        skipped: Steps of this process that did not change the weights.
        nonfinite: Those of the skipped steps that the non-finite rule counted.
    """

    iteration: int = 0
    skipped: int = 0
    nonfinite: int = 0


@dataclass(frozen=True)
class StepReport:
    """Result and speed of one step.

    Attributes:
        result: What the engine returned.
        seconds: Wall time of the step.
        samples_per_second: Over all data-parallel ranks.
        tokens_per_second: Over all data-parallel ranks.
        flops_per_second_per_gpu: Floating-point operations, recomputed activations included.
        peak_memory: Bytes on this rank.
        reading: The part of `seconds` that the step waited for data.
        samples: Over all data-parallel ranks.
        seq_length: Tokens of each sample.
    """

    result: StepResult
    seconds: float
    samples_per_second: float
    tokens_per_second: float
    flops_per_second_per_gpu: float
    peak_memory: int
    reading: float = 0.0
    samples: int = 0
    seq_length: int = 0

    def scalars(self) -> dict[str, float]:
        """Return the step's numbers under gpt-neox's names."""
        return {
            **{f"train/{name}": score for name, score in self.result.scores.items()},
            "train/learning_rate": self.result.lr,
            "train/loss_scale": self.result.loss_scale,
            "train/grad_norm": self.result.grad_norm,
            "train/skipped": float(self.result.skipped),
            "train/batch_size": float(self.samples),
            "train/seq_length": float(self.seq_length),
            "runtime/samples_per_sec": self.samples_per_second,
            "runtime/tokens_per_sec": self.tokens_per_second,
            "runtime/iteration_time": self.seconds,
            "runtime/flops_per_sec_per_gpu": self.flops_per_second_per_gpu,
            "runtime/peak_memory_bytes": float(self.peak_memory),
            "timers/batch_generator": self.reading,
            **{f"timers/{part}": seconds for part, seconds in self.result.timers.items()},
            **({} if self.result.noise_scale is None else {"train/noise_scale": self.result.noise_scale}),
        }


class Callback:
    """Observer of a training; those that report belong to rank 0. Every method does nothing unless it is overridden."""

    def on_start(self, state: TrainState) -> None:
        """Handle the start, before the first step."""

    def on_step(self, state: TrainState, report: StepReport) -> None:
        """Handle a completed step."""

    def on_evaluation(self, state: TrainState, name: str, scalars: Mapping[str, float]) -> None:
        """Handle an evaluation; `name` is `validation`, `test` or `tasks`."""

    def on_save(self, state: TrainState, report: SaveReport) -> None:
        """Handle a committed checkpoint, with `async_save` of an earlier iteration than the state's."""

    def on_end(self, state: TrainState) -> None:
        """Handle the end after the last step, also of a run that ends early."""

    def on_failure(self, state: TrainState) -> None:
        """Release resources after an error; called instead of `on_end`, maybe before `on_start` has returned."""
