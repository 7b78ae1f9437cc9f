"""Lines of training on the terminal, in the form of gpt-neox, FleetX or OneFlow."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from neox.engine import Feature, SaveReport, StepReport, TrainState
from neox.metrics import AMOUNTS
from neox.plan import RunPlan

_LINES_OF_SHORT_RUN = 20


def build(plan: RunPlan, rank: int) -> TerminalLine | None:
    """Return the lines, on rank 0."""
    return TerminalLine(plan) if rank == 0 else None


@dataclass(frozen=True)
class Interval:
    """Steps since the last line.

    Attributes:
        plan: The run.
        state: Progress after the last step.
        reports: Report of each step.
    """

    plan: RunPlan
    state: TrainState
    reports: Sequence[StepReport]

    @property
    def last(self) -> StepReport:
        """Report of the last step."""
        return self.reports[-1]

    @property
    def seconds(self) -> float:
        """Wall time of the mean step."""
        return self._mean(lambda report: report.seconds)

    @property
    def reading(self) -> float:
        """Seconds that the mean step waited for data."""
        return self._mean(lambda report: report.reading)

    @property
    def scores(self) -> dict[str, float | None]:
        """Means of each score over the steps in which it is finite; nan if it never is, None if no step has it."""
        means: dict[str, float | None] = {}
        for name in self.last.result.scores:
            values = [value for report in self.reports if (value := report.result.scores[name]) is not None]
            finite = [value for value in values if math.isfinite(value)]
            means[name] = sum(finite) / len(finite) if finite else math.nan
            if not values:
                means[name] = None
        return means

    @property
    def loss(self) -> float | None:
        """Mean of the trained losses that are finite; nan if none is, None if no step has a label."""
        return next(iter(self.scores.values()))

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second over all data ranks."""
        return self._rate(lambda report: report.tokens_per_second)

    @property
    def samples_per_second(self) -> float:
        """Samples per second over all data ranks."""
        return self._rate(lambda report: report.samples_per_second)

    @property
    def flops_per_second_per_gpu(self) -> float:
        """Floating-point operations per second and rank."""
        return self._rate(lambda report: report.flops_per_second_per_gpu)

    @property
    def timers(self) -> dict[str, float]:
        """Seconds of each part of the mean step; none if they are not measured."""
        means = {}
        for part in self.last.result.timers:
            means[part] = sum(report.result.timers[part] for report in self.reports) / len(self.reports)
        return means

    def _mean(self, value: Callable[[StepReport], float]) -> float:
        return sum(map(value, self.reports)) / len(self.reports)

    def _rate(self, rate: Callable[[StepReport], float]) -> float:
        """Return a rate over all steps, whose batches may differ, from the rate of each."""
        done = sum(rate(report) * report.seconds for report in self.reports)
        return done / sum(report.seconds for report in self.reports)


class TerminalLine(Feature):
    """Printer of one line every `log_interval` iterations, with means of the steps since the last one (`log_style`).

    If `log_interval` is not given, a short run prints about twenty lines.

    Args:
        plan: The run.
    """

    def __init__(self, plan: RunPlan) -> None:
        self.plan = plan
        self.train_iters = plan.config.training.train_iters or 0
        self.log_interval = plan.config.logging.log_interval
        if not plan.config.given("log_interval"):
            self.log_interval = min(self.log_interval, max(1, self.train_iters // _LINES_OF_SHORT_RUN))
        self._reports: list[StepReport] = []
        self._first = True

    def on_start(self, state: TrainState) -> None:
        """Print the range of iterations, and the head of a table."""
        print(f"training from iteration {state.iteration} to {self.train_iters}", flush=True)
        for line in _HEADS.get(self.plan.config.logging.log_style, ()):
            print(line, flush=True)

    def on_step(self, state: TrainState, report: StepReport) -> None:
        """Print a line if one is due."""
        self._reports.append(report)
        keys = self.plan.config.logging
        is_last = state.iteration == self.train_iters
        if state.iteration % self.log_interval != 0 and not self._first and not is_last:
            return
        interval = Interval(self.plan, state, self._reports)
        lines = [LINES[keys.log_style](interval)]
        if interval.timers:
            lines.append(_timers_line(interval.timers))
        print("\n".join(lines), flush=True)
        self._reports.clear()
        self._first = False

    def on_evaluation(self, state: TrainState, name: str, scalars: Mapping[str, float | None]) -> None:
        """Print the scores."""
        parts = [f"{name} at iteration {state.iteration}"]
        for key, value in scalars.items():
            group, _, shown = key.partition("/")
            if shown.rpartition("/")[2] in AMOUNTS:
                parts.append(f"{shown}: {_number(value, '.0f')}")
            elif group != "timers":
                parts.append(f"{shown}: {_number(value, '.6E')}")
        print(" " + " | ".join(parts), flush=True)

    def on_save(self, state: TrainState, report: SaveReport) -> None:
        """Print the path and the time that the save took."""
        waited = f"training waited {report.stall:.2f} s"
        print(f" saved {report.path} | {waited}, committed after {report.seconds:.2f} s", flush=True)


def _number(value: float | None, form: str) -> str:
    """Return a number in a form of Python's `format`; `none` if nothing was counted."""
    return "none" if value is None else format(value, form)


def _neox_line(interval: Interval) -> str:
    """Return gpt-neox's line, with tokens/s, peak memory and the time left."""
    state = interval.state
    last = interval.last
    train_iters = interval.plan.config.training.train_iters or 0
    parts = [
        f"samples/sec: {interval.samples_per_second:.3f}",
        f"iteration {state.iteration:8d}/{train_iters:8d}",
        f"elapsed time per iteration (ms): {1000 * interval.seconds:.1f}",
        f"learning rate: {last.result.lr:.3E}",
        f"approx flops per GPU: {interval.flops_per_second_per_gpu / 1e12:.3f}TFLOPS",
    ]
    parts += [f"{name}: {_number(score, '.6E')}" for name, score in interval.scores.items()]
    if interval.plan.config.logging.log_grad_norm:
        parts.append(f"grad norm: {last.result.grad_norm:.3f}")
    parts += [
        f"loss scale: {last.result.loss_scale:.1f}",
        f"number of skipped iterations: {state.skipped_updates:3d}",
        f"number of nan iterations: {state.nonfinite:3d}",
        f"tokens/sec: {interval.tokens_per_second:,.0f}",
        f"peak memory: {last.peak_memory / 2**30:.2f} GiB",
        f"ETA: {_duration(interval.seconds * (train_iters - state.iteration))}",
    ]
    return " " + " | ".join(parts) + " |"


def _fleetx_line(interval: Interval) -> str:
    """Return FleetX's line: epochs and batches within them count from 0, `ips` is of one data-parallel rank."""
    schedule = interval.plan.batch_schedule
    done = interval.state.iteration - 1
    epoch, read = divmod(schedule.samples(done), interval.plan.amounts.epoch_samples or math.inf)
    tokens = interval.tokens_per_second
    return (
        f"global step {interval.state.iteration}, epoch: {epoch:.0f}, batch: {read // schedule.batch_size(done):.0f}, "
        f"loss: {_number(interval.loss, '.9f')}, "
        f"avg_reader_cost: {interval.reading:.5f} sec, "
        f"avg_batch_cost: {interval.seconds:.5f} sec, speed: {1 / interval.seconds:.2f} step/s, "
        f"ips_total: {tokens:.0f} tokens/s, ips: {tokens / interval.plan.grid.dp_size:.0f} tokens/s, "
        f"learning rate: {interval.last.result.lr:.5e}"
    )


def _oneflow_line(interval: Interval) -> str:
    """Return a row of OneFlow's table: what was read so far, samples/s and seconds of the mean step."""
    samples = interval.plan.batch_schedule.samples(interval.state.iteration)
    return _row(
        {
            "step": f"{interval.state.iteration}",
            "micro_batches": f"{samples // interval.plan.batch.samples_at_once}",
            "samples": f"{samples}",
            "throughput": f"{interval.samples_per_second:.5f}",
            "latency": f"{interval.seconds:.5f}",
            "loss": _number(interval.loss, ".5f"),
        }
    )


_ONEFLOW_COLUMNS: Mapping[str, int] = MappingProxyType(
    {"step": 8, "micro_batches": 15, "samples": 15, "throughput": 10, "latency": 10, "loss": 10}
)
"""Width of each column of OneFlow's table."""


def _row(values: Mapping[str, str]) -> str:
    cells = [f"| {values[name]:<{width}} " for name, width in _ONEFLOW_COLUMNS.items()]
    return "".join(cells) + "|"


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


def _timers_line(timers: Mapping[str, float]) -> str:
    """Return gpt-neox's line of timers, in milliseconds."""
    shown = " | ".join(f"{part}: {1000 * seconds:.2f}" for part, seconds in timers.items())
    return f" time (ms) | {shown}"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    shown = f"{hours:02d}:{minutes:02d}:{seconds:02d}"
    return f"{days}d {shown}" if days else shown
