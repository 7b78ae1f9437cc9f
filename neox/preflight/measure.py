"""Measurement of layouts: short training runs on the available hosts, in a temporary directory."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from neox.errors import LaunchError
from neox.features.on_paper import PAPERS
from neox.launch.child_runs import ChildRuns, last_line
from neox.launch.processes import exit_status
from neox.log import progress
from neox.metrics import METRICS_FILE, curves
from neox.plan.search.fastest import Suggestion

STEPS = 8
"""Number of steps that each layout trains for."""
_FIRST_STEPS = 3
"""Number of first steps that are not timed: they compile, allocate memory and connect ranks."""
_STEP_SECONDS = "runtime/iteration_time"
_NOTHING_BUT_STEPS = (
    "save=null",
    "load=null",
    "eval_iters=0",
    *(override for paper in PAPERS for override in paper.off),
)
"""Overrides of a measured run: it reads only its data, and writes only metrics."""


@dataclass(frozen=True)
class MeasuredLayout:
    """A layout that was measured.

    Attributes:
        layout: The layout, with its estimates.
        seconds: Median time of a step; None if the run failed.
        failure: Reason of the failure; empty if the run succeeded.
    """

    layout: Suggestion
    seconds: float | None
    failure: str = ""


@dataclass(frozen=True)
class Measurement:
    """Result of `measure_layouts`.

    Attributes:
        layouts: Layouts that were measured, the fastest first, and those that failed last.
        stopped_by: Number of the signal that ended the measurement early; None if it ran to its end.
    """

    layouts: tuple[MeasuredLayout, ...]
    stopped_by: int | None


def measure_layouts(layouts: Sequence[Suggestion], command: Sequence[str], run_directory: Path) -> Measurement:
    """Train each layout for `STEPS` steps, one after another.

    A signal ends the current run and the measurement. Results up to then are returned.

    Args:
        layouts: Layouts to measure, in this order.
        command: Command line of `deepy.py` that starts the run as configured.
        run_directory: Directory of the run. Measured runs log to a directory next to it, which is removed at the end.

    Raises:
        LaunchError: The directory cannot be created.
    """
    try:
        run_directory.parent.mkdir(parents=True, exist_ok=True)
        directory = Path(tempfile.mkdtemp(prefix=f"{run_directory.name}-measured-", dir=run_directory.parent))
    except OSError as error:
        raise LaunchError(f"cannot create a directory for measured runs next to {run_directory}: {error}") from None
    measured: list[MeasuredLayout] = []
    try:
        with ChildRuns() as runs, progress("measure", len(layouts), "layouts") as bar:
            for number, layout in enumerate(layouts):
                found = _measure(runs, command, layout, directory / str(number))
                if runs.stopped_by is not None:
                    break
                measured.append(found)
                bar.update()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    measured.sort(key=_seconds_or_last)
    return Measurement(tuple(measured), runs.stopped_by)


def _seconds_or_last(measured: MeasuredLayout) -> float:
    return float("inf") if measured.seconds is None else measured.seconds


def _measure(runs: ChildRuns, command: Sequence[str], layout: Suggestion, directory: Path) -> MeasuredLayout:
    """Train a layout for a few steps and return the median time of a step, or why there is none."""
    directory.mkdir()
    output = directory / "output.txt"
    with output.open("wb") as file:
        process = runs.start([*command, *_measured_keys(layout, directory)], file.fileno())
        status = exit_status(process.wait())
    if status != 0:
        text = output.read_text(encoding="utf-8", errors="replace")
        return MeasuredLayout(layout, None, last_line(text, status))
    metrics = directory / METRICS_FILE
    if not metrics.exists():
        reason = f"{metrics} is not visible on this host; set log_dir to a path that all hosts share"
        return MeasuredLayout(layout, None, reason)
    seconds = curves(metrics, [_STEP_SECONDS]).get(_STEP_SECONDS, {})
    counted = [value for iteration, value in seconds.items() if iteration > _FIRST_STEPS]
    if not counted:
        return MeasuredLayout(layout, None, f"the run ended after {len(seconds)} steps; train_iters is too small")
    return MeasuredLayout(layout, median(counted))


def _measured_keys(layout: Suggestion, directory: Path) -> list[str]:
    """Return the flags with which a run trains a layout for a few steps and writes only to a directory."""
    keys = [f"{key}={value}" for key, value in layout.changes]
    keys += [*_NOTHING_BUT_STEPS, f"exit_interval={STEPS}", f"log_dir={directory}"]
    flags = []
    for key in keys:
        flags += ["--set", key]
    return flags
