"""NeoX's line on the terminal, with tokens/s, peak memory and the time left."""

from __future__ import annotations

import math
from collections.abc import Mapping

from neox.engine import SaveReport
from neox.train.callbacks import Callback, StepReport
from neox.train.state import TrainState


class TerminalLine(Callback):
    """Prints a line every `log_interval` iterations, for the mean of the steps since the last one."""

    def __init__(self, train_iters: int, log_interval: int, *, log_grad_norm: bool) -> None:
        self.train_iters, self.log_interval, self.log_grad_norm = train_iters, log_interval, log_grad_norm
        self._reports: list[StepReport] = []
        self._first = True

    def on_start(self, state: TrainState) -> None:
        print(f"training from iteration {state.iteration} to {self.train_iters}", flush=True)

    def on_step(self, state: TrainState, report: StepReport) -> None:
        self._reports.append(report)
        if state.iteration % self.log_interval == 0 or self._first or state.iteration == self.train_iters:
            print(self._line(state), flush=True)
            self._reports.clear()
            self._first = False

    def on_evaluation(self, state: TrainState, name: str, scalars: Mapping[str, float]) -> None:
        shown = {key.split("/")[1]: value for key, value in scalars.items() if not key.startswith("timers/")}
        values = " | ".join(f"{key}: {value:.6E}" for key, value in shown.items())
        print(f" {name} at iteration {state.iteration} | {values}", flush=True)

    def on_save(self, state: TrainState, report: SaveReport) -> None:
        waited = f"training waited {report.stall:.2f} s"
        print(f" saved {report.path} | {waited}, committed after {report.seconds:.2f} s", flush=True)

    def _line(self, state: TrainState) -> str:
        count = len(self._reports)
        seconds = sum(r.seconds for r in self._reports) / count
        last = self._reports[-1]
        finite = [r.result.loss for r in self._reports if math.isfinite(r.result.loss)]
        loss = sum(finite) / len(finite) if finite else math.nan
        per_second = seconds / last.seconds  # rates of the last step, scaled to the mean step
        parts = [
            f"samples/sec: {last.samples_per_second / per_second:.3f}",
            f"iteration {state.iteration:8d}/{self.train_iters:8d}",
            f"elapsed time per iteration (ms): {1000 * seconds:.1f}",
            f"learning rate: {last.result.lr:.3E}",
            f"approx flops per GPU: {last.flops_per_second_per_gpu / per_second / 1e12:.3f}TFLOPS",
            f"lm_loss: {loss:.6E}",
            *([f"grad norm: {last.result.grad_norm:.3f}"] if self.log_grad_norm else []),
            f"loss scale: {last.result.loss_scale:.1f}",
            f"number of skipped iterations: {state.skipped:3d}",
            f"number of nan iterations: {state.nonfinite:3d}",
            f"tokens/sec: {last.tokens_per_second / per_second:,.0f}",
            f"peak memory: {last.peak_memory / 2**30:.2f} GiB",
            f"ETA: {_duration(seconds * (self.train_iters - state.iteration))}",
        ]
        return " " + " | ".join(parts) + " |"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return (f"{days}d " if days else "") + f"{hours:02d}:{minutes:02d}:{seconds:02d}"
