"""Callbacks of the training loop: their base class, and what they are told."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from neox.engine import SaveReport, StepResult


@dataclass
class TrainState:
    """Progress of one process's training.

    Attributes:
        iteration: Number of completed steps, counted from 1 over all resumes.
        skipped: Number of steps of this process that did not change the weights.
        nonfinite: Number of those that the rule about losses and norms that are not finite counted.
    """

    iteration: int = 0
    skipped: int = 0
    nonfinite: int = 0


def peak_memory() -> int:
    """Return the most bytes held so far: by tensors on the GPU, or by the whole process on a CPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@dataclass(frozen=True)
class StepReport:
    """Result and speed of one step.

    Attributes:
        result: Result of the engine.
        seconds: Wall time of the step.
        samples: Number of samples over all data ranks.
        seq_length: Tokens of each sample.
        flops: Floating-point operations of the step on all ranks, recomputed ones included.
        ranks: Number of ranks.
        reading: Part of `seconds` that the step waited for data.
        peak_memory: Most bytes held so far on this rank.
        added: Numbers of callbacks (`Callback.step_scalars`), by their names in metrics.
    """

    result: StepResult
    seconds: float
    samples: int
    seq_length: int
    flops: float
    ranks: int = 1
    reading: float = 0.0
    peak_memory: int = field(default_factory=peak_memory)
    added: Mapping[str, float] = field(default_factory=dict)

    @property
    def samples_per_second(self) -> float:
        """Samples per second over all data ranks."""
        return self.samples / self.seconds

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second over all data ranks."""
        return self.samples * self.seq_length / self.seconds

    @property
    def flops_per_second_per_gpu(self) -> float:
        """Floating-point operations per second and rank."""
        return self.flops / self.seconds / self.ranks

    def scalars(self) -> dict[str, float]:
        """Return the step's numbers under their names in metrics, most of which are gpt-neox's.

        A new log field is a line here. The scores come first, and of these the trained loss.
        """
        values = {f"train/{name}": score for name, score in self.result.scores.items()}
        values |= {
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
        }
        for part, seconds in self.result.timers.items():
            values[f"timers/{part}"] = seconds
        if self.result.noise_scale is not None:
            values["train/noise_scale"] = self.result.noise_scale
        values.update(self.result.stability)
        values.update(self.added)
        return values


class Callback:
    """Observer of a training. Every method does nothing unless it is overridden.

    Callbacks that report belong to rank 0. One that communicates with other ranks belongs to every rank.
    """

    def on_start(self, state: TrainState) -> None:
        """Handle the start, before the first step."""

    def step_scalars(self, state: TrainState, report: StepReport) -> Mapping[str, float]:
        """Return further numbers of a completed step, by their names in metrics.

        They are in the report that `on_step` of all callbacks gets.
        """
        return {}

    def on_step(self, state: TrainState, report: StepReport) -> None:
        """Handle a completed step."""

    def evaluation_scalars(self, state: TrainState, name: str) -> Mapping[str, float]:
        """Return further numbers of a completed evaluation, by their names in metrics.

        They are among the scalars that `on_evaluation` of all callbacks gets.
        """
        return {}

    def on_evaluation(self, state: TrainState, name: str, scalars: Mapping[str, float]) -> None:
        """Handle an evaluation; `name` is `validation`, `test`, `tasks`, `validation_ema` or `test_ema`."""

    def on_save(self, state: TrainState, report: SaveReport) -> None:
        """Handle a committed checkpoint. With `async_save` it is of an earlier iteration than the state's."""

    def on_end(self, state: TrainState) -> None:
        """Handle the end after the last step, also of a run that ends early."""

    def on_failure(self, state: TrainState) -> None:
        """Release resources after an error. It is called instead of `on_end`, maybe before `on_start` has returned."""
