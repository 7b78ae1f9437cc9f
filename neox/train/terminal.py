"""Lines of training on the terminal, in the form of gpt-neox, FleetX or OneFlow."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from neox.engine import SaveReport
from neox.plan import RunPlan
from neox.train.callbacks import Callback, StepReport, TrainState


@dataclass(frozen=True)
class Interval:
    """Steps since the last line.

    Attributes:
        plan: Of the run.
        state: After the last step.
        reports: Of each step.
        epoch_samples: Samples of one pass over the training data; 0 where the style does not show it.
    """

    plan: RunPlan
    state: TrainState
    reports: Sequence[StepReport]
    epoch_samples: int = 0

    @property
    def last(self) -> StepReport:
        """The last step."""
        return self.reports[-1]

    @property
    def seconds(self) -> float:
        """Wall time of the mean step."""
        return sum(report.seconds for report in self.reports) / len(self.reports)

    @property
    def scores(self) -> dict[str, float]:
        """Means of each score over the steps where it is finite; nan where it never is."""
        return {name: self._mean(name) for name in self.last.result.scores}

    @property
    def loss(self) -> float:
        """Mean of the losses that are finite; nan where none is."""
        return next(iter(self.scores.values()))

    def _mean(self, name: str) -> float:
        finite = [score for report in self.reports if math.isfinite(score := report.result.scores[name])]
        return sum(finite) / len(finite) if finite else math.nan

    def rate(self, of_step: Callable[[StepReport], float]) -> float:
        """Return a rate over all steps, whose batches may differ, from that of each."""
        return sum(of_step(report) * report.seconds for report in self.reports) / sum(r.seconds for r in self.reports)

    @property
    def tokens_per_second(self) -> float:
        """Over all data-parallel ranks."""
        return self.rate(lambda report: report.tokens_per_second)

    @property
    def samples_per_second(self) -> float:
        """Over all data-parallel ranks."""
        return self.rate(lambda report: report.samples_per_second)


class TerminalLine(Callback):
    """Printer of one line every `log_interval` iterations for the mean of the steps since the last one (`log_style`).

    Args:
        plan: Of the run.
        epoch_samples: Samples of one pass over the training data, which FleetX's line counts.
    """

    def __init__(self, plan: RunPlan, epoch_samples: int = 0) -> None:
        self.plan, self.epoch_samples = plan, epoch_samples
        self.train_iters = plan.config.training.train_iters or 0
        self._reports: list[StepReport] = []
        self._first = True

    def on_start(self, state: TrainState) -> None:
        """Print the range of iterations, and the head of a table."""
        print(f"training from iteration {state.iteration} to {self.train_iters}", flush=True)
        for line in _HEADS.get(self.plan.config.logging.log_style, ()):
            print(line, flush=True)

    def on_step(self, state: TrainState, report: StepReport) -> None:
        """Print a line where one is due."""
        self._reports.append(report)
        keys = self.plan.config.logging
        if state.iteration % keys.log_interval == 0 or self._first or state.iteration == self.train_iters:
            interval = Interval(self.plan, state, self._reports, self.epoch_samples)
            print("\n".join([LINES[keys.log_style](interval), *_timers_line(interval)]), flush=True)
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


def _neox_line(interval: Interval) -> str:
    """Return gpt-neox's line, with tokens/s, peak memory and the time left."""
    state, last, train_iters = interval.state, interval.last, interval.plan.config.training.train_iters or 0
    parts = [
        f"samples/sec: {interval.samples_per_second:.3f}",
        f"iteration {state.iteration:8d}/{train_iters:8d}",
        f"elapsed time per iteration (ms): {1000 * interval.seconds:.1f}",
        f"learning rate: {last.result.lr:.3E}",
        f"approx flops per GPU: {interval.rate(lambda report: report.flops_per_second_per_gpu) / 1e12:.3f}TFLOPS",
        *(f"{name}: {score:.6E}" for name, score in interval.scores.items()),
        *([f"grad norm: {last.result.grad_norm:.3f}"] if interval.plan.config.logging.log_grad_norm else []),
        f"loss scale: {last.result.loss_scale:.1f}",
        f"number of skipped iterations: {state.skipped:3d}",
        f"number of nan iterations: {state.nonfinite:3d}",
        f"tokens/sec: {interval.tokens_per_second:,.0f}",
        f"peak memory: {last.peak_memory / 2**30:.2f} GiB",
        f"ETA: {_duration(interval.seconds * (train_iters - state.iteration))}",
    ]
    return " " + " | ".join(parts) + " |"


def _fleetx_line(interval: Interval) -> str:
    """Return FleetX's line: epochs and batches within them count from 0, `ips` is of one data-parallel rank."""
    reports, schedule, done = interval.reports, interval.plan.batch_schedule, interval.state.iteration - 1
    epoch, read = divmod(schedule.samples(done), interval.epoch_samples or math.inf)
    tokens = interval.tokens_per_second
    return (
        f"global step {interval.state.iteration}, epoch: {epoch:.0f}, batch: {read // schedule.batch_size(done):.0f}, "
        f"loss: {interval.loss:.9f}, "
        f"avg_reader_cost: {sum(report.reading for report in reports) / len(reports):.5f} sec, "
        f"avg_batch_cost: {interval.seconds:.5f} sec, speed: {1 / interval.seconds:.2f} step/s, "
        f"ips_total: {tokens:.0f} tokens/s, ips: {tokens / interval.plan.grid.dp_size:.0f} tokens/s, "
        f"learning rate: {interval.last.result.lr:.5e}"
    )


def _oneflow_line(interval: Interval) -> str:
    """Return a row of OneFlow's table: what was read so far, samples/s and seconds of the mean step."""
    batch, iteration = interval.plan.batch, interval.state.iteration
    samples = interval.plan.batch_schedule.samples(iteration)
    values = (
        f"{iteration}",
        f"{samples // batch.samples_at_once}",
        f"{samples}",
        f"{interval.samples_per_second:.5f}",
        f"{interval.seconds:.5f}",
        f"{interval.loss:.5f}",
    )
    return _row(dict(zip(_ONEFLOW_COLUMNS, values, strict=True)))


_ONEFLOW_COLUMNS: Mapping[str, int] = MappingProxyType(
    {"step": 8, "micro_batches": 15, "samples": 15, "throughput": 10, "latency": 10, "loss": 10}
)


def _row(values: Mapping[str, str]) -> str:
    return "".join(f"| {values[name]:<{width}} " for name, width in _ONEFLOW_COLUMNS.items()) + "|"


LINES: Mapping[str, Callable[[Interval], str]] = MappingProxyType(
    {"neox": _neox_line, "fleetx": _fleetx_line, "oneflow": _oneflow_line}
)
"""Form of a line, by `log_style`."""

_HEADS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "oneflow": (
            _row({name: name for name in _ONEFLOW_COLUMNS}),
            _row({name: "-" * width for name, width in _ONEFLOW_COLUMNS.items()}),
        )
    }
)


def _timers_line(interval: Interval) -> list[str]:
    """Return gpt-neox's line of timers, milliseconds of the mean step; none where they are off."""
    count, parts = len(interval.reports), interval.last.result.timers
    means = {part: sum(report.result.timers[part] for report in interval.reports) / count for part in parts}
    shown = " | ".join(f"{part}: {1000 * seconds:.2f}" for part, seconds in means.items())
    return [f" time (ms) | {shown}"] if shown else []


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return (f"{days}d " if days else "") + f"{hours:02d}:{minutes:02d}:{seconds:02d}"
