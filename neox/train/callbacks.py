"""Callbacks of the training loop: their base class, what they are told, and the line on the terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from neox.engine import SaveReport, StepResult


@dataclass
class TrainState:
    """Progress of one process's training.

    Attributes:
        iteration: Completed steps, counted from 1 over all resumes.
        skipped: Steps of this process that did not change the weights.
        nonfinite: Those of the skipped steps that the non-finite rule counted.
        losses: The last loss of training and of each evaluation, by name.
    """

    iteration: int = 0
    skipped: int = 0
    nonfinite: int = 0
    losses: dict[str, float] = field(default_factory=dict)


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
            "train/lm_loss": self.result.loss,
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


class TerminalLine(Callback):
    """Printer of gpt-neox's line, with tokens/s, peak memory and the time left.

    Args:
        train_iters: The last iteration.
        log_interval: Iterations between two lines, each for the mean of the steps since the last one.
        log_grad_norm: Whether lines show the gradient norm.
    """

    def __init__(self, train_iters: int, log_interval: int, *, log_grad_norm: bool) -> None:
        self.train_iters, self.log_interval, self.log_grad_norm = train_iters, log_interval, log_grad_norm
        self._reports: list[StepReport] = []
        self._first = True

    def on_start(self, state: TrainState) -> None:
        """Print the range of iterations."""
        print(f"training from iteration {state.iteration} to {self.train_iters}", flush=True)

    def on_step(self, state: TrainState, report: StepReport) -> None:
        """Print a line where one is due."""
        self._reports.append(report)
        if state.iteration % self.log_interval == 0 or self._first or state.iteration == self.train_iters:
            print(self._line(state), flush=True)
            self._reports.clear()
            self._first = False

    def on_evaluation(self, state: TrainState, name: str, scalars: Mapping[str, float]) -> None:
        """Print the scores."""
        shown = {key.split("/")[1]: value for key, value in scalars.items() if not key.startswith("timers/")}
        values = " | ".join(f"{key}: {value:.6E}" for key, value in shown.items())
        print(f" {name} at iteration {state.iteration} | {values}", flush=True)

    def on_save(self, state: TrainState, report: SaveReport) -> None:
        """Print the path and the time that the save took."""
        waited = f"training waited {report.stall:.2f} s"
        print(f" saved {report.path} | {waited}, committed after {report.seconds:.2f} s", flush=True)

    def _line(self, state: TrainState) -> str:
        count = len(self._reports)
        total = sum(r.seconds for r in self._reports)
        seconds = total / count
        last = self._reports[-1]
        finite = [r.result.loss for r in self._reports if math.isfinite(r.result.loss)]
        loss = sum(finite) / len(finite) if finite else math.nan
        samples = sum(r.samples_per_second * r.seconds for r in self._reports) / total  # batches of steps may differ
        tokens = sum(r.tokens_per_second * r.seconds for r in self._reports) / total
        flops = sum(r.flops_per_second_per_gpu * r.seconds for r in self._reports) / total
        parts = [
            f"samples/sec: {samples:.3f}",
            f"iteration {state.iteration:8d}/{self.train_iters:8d}",
            f"elapsed time per iteration (ms): {1000 * seconds:.1f}",
            f"learning rate: {last.result.lr:.3E}",
            f"approx flops per GPU: {flops / 1e12:.3f}TFLOPS",
            f"lm_loss: {loss:.6E}",
            *([f"grad norm: {last.result.grad_norm:.3f}"] if self.log_grad_norm else []),
            f"loss scale: {last.result.loss_scale:.1f}",
            f"number of skipped iterations: {state.skipped:3d}",
            f"number of nan iterations: {state.nonfinite:3d}",
            f"tokens/sec: {tokens:,.0f}",
            f"peak memory: {last.peak_memory / 2**30:.2f} GiB",
            f"ETA: {_duration(seconds * (self.train_iters - state.iteration))}",
        ]
        return " " + " | ".join(parts) + " |"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return (f"{days}d " if days else "") + f"{hours:02d}:{minutes:02d}:{seconds:02d}"
