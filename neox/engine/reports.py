"""What a training says of itself: the result of a step, of a save, and the progress of the run."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from deepspeed.accelerator import get_accelerator

from neox.engine.device import device_kind


@dataclass
class TrainState:
    """Progress of one process's training.

    Attributes:
        iteration: Number of completed steps, counted from 1 over all resumes.
        skipped_updates: Number of steps of this process that did not change the weights.
        nonfinite: Number of those that the rule about losses and norms that are not finite counted.
    """

    iteration: int = 0
    skipped_updates: int = 0
    nonfinite: int = 0


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step.

    Attributes:
        scores: The objective's scores over all micro batches and data ranks, by name, the trained loss first; None
            where nothing was counted.
        grad_norm: L2 norm of the whole model's gradient before clipping; inf if it is not finite.
        loss_scale: Loss scale of fp16; 1 in other precisions.
        lr: Learning rate of this step.
        update_skipped: Whether the weights were left unchanged (`neox.engine.engine` says what moves all the same).
        timers: Seconds in each part of the step on this rank, with `wall_clock_breakdown`.
        computing: Seconds of forward and backward passes on this rank, without what it waited for other ranks; 0 if
            hosts are not compared.
        numbers: Numbers of features (`Feature.after_step`), by their names in metrics.
    """

    scores: Mapping[str, float | None]
    grad_norm: float
    loss_scale: float
    lr: float
    update_skipped: bool
    timers: Mapping[str, float] = field(default_factory=dict)
    computing: float = field(default=0.0, compare=False)
    numbers: Mapping[str, float] = field(default_factory=dict)

    @property
    def loss(self) -> float | None:
        """The trained loss; None if no micro batch had a label."""
        return next(iter(self.scores.values()))


def peak_memory() -> int:
    """Return the most bytes held so far: by tensors on the accelerator, or by the whole process on a CPU."""
    if device_kind() != "cpu":
        return int(get_accelerator().max_memory_allocated())
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
    """

    result: StepResult
    seconds: float
    samples: int
    seq_length: int
    flops: float
    ranks: int = 1
    reading: float = 0.0
    peak_memory: int = field(default_factory=peak_memory)

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

    def scalars(self) -> dict[str, float | None]:
        """Return the step's numbers under their names in metrics, most of which are gpt-neox's.

        A new log field is a line here, or a number of a feature. The scores come first, and of these the trained loss.
        """
        values: dict[str, float | None] = {f"train/{name}": score for name, score in self.result.scores.items()}
        values |= {
            "train/learning_rate": self.result.lr,
            "train/loss_scale": self.result.loss_scale,
            "train/grad_norm": self.result.grad_norm,
            "train/skipped": float(self.result.update_skipped),
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
        values.update(self.result.numbers)
        return values


@dataclass(frozen=True)
class SaveReport:
    """A committed checkpoint.

    Attributes:
        path: Directory of the checkpoint.
        iteration: Completed steps.
        stall: Seconds for which training waited.
        seconds: Seconds from the start of the save until it was committed.
    """

    path: Path
    iteration: int
    stall: float
    seconds: float

    def scalars(self) -> dict[str, float | None]:
        """Return the durations under their names in metrics."""
        return {"runtime/save_stall": self.stall, "runtime/save_seconds": self.seconds}
