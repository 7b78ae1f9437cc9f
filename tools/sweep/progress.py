"""Progress of a sweep: its results so far, the runs that are in training now, and the time that is left.

sweep.json                  record.read_record      the runs, and what was known when they were launched
  RunResult                 results.read_results    the rows of the table
  status of a run           neox.launch.status      step, speed and loss of those in training
    SweepProgress           read_progress           also the time that is left
      text, JSON            format_progress, progress_json
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from neox.errors import DataError
from neox.launch.status.run_status import GOING_ON, Status, duration, progress_words, run_status
from tools.sweep.record import SweepRecord, read_record
from tools.sweep.results import PICTURE, TABLE, RunResult, best_words, format_table, read_results
from tools.sweep.run_files import State

_RESULTS = (TABLE, PICTURE, "ladder.json", "ladder.png")
_LIVE_KEYS = ("state", "step", "steps", "loss", "seconds_per_step", "tokens_per_second", "seconds_left")
"""What is shown of the status of a run."""


@dataclass(frozen=True)
class TimeLeft:
    """Estimated time until the last run ends.

    Attributes:
        seconds: The time, with as many runs at a time as the sweep has places.
        basis: What the estimate follows from, in words.
    """

    seconds: float
    basis: str


@dataclass(frozen=True)
class SweepProgress:
    """Progress of a sweep.

    Attributes:
        record: The sweep and its runs.
        is_running: Whether a process trains the runs at this moment.
        results: Results of the runs, the best first.
        live: Status of each run that is in training now, by name.
        left: Estimated time until the last run ends; None if nothing is left, or nothing is known to estimate it from.
        others: Status of other runs in the same directory by name: a ladder's target, and runs of an earlier sweep.
    """

    record: SweepRecord
    is_running: bool
    results: Sequence[RunResult]
    live: Mapping[str, Status]
    left: TimeLeft | None
    others: Mapping[str, Status]

    @property
    def state(self) -> str:
        """State of the sweep in one word."""
        if self.is_running or self.live:
            return "running"
        if self.record.sweep.following or not all(result.state.has_ended for result in self.results):
            return "stopped"
        return "failed" if any(result.state is State.FAILED for result in self.results) else "finished"

    @property
    def counts(self) -> dict[str, int]:
        """Number of runs in each state. Those that have begun are in training, or are resumed later."""
        counts = {state.value: 0 for state in State}
        counts["in training"] = len(self.live)
        for result in self.results:
            if result.name not in self.live:
                counts[result.state.value] += 1
        return counts


def sweep_progress(directory: Path) -> SweepProgress:
    """Return the progress of the sweep or ladder of a directory. Raises DataError if its record cannot be read."""
    return read_progress(read_record(directory))


def read_progress(record: SweepRecord) -> SweepProgress:
    """Return the progress of a sweep from the files of its runs."""
    is_running = record.is_running
    launches = record.launches
    training = launches.training if is_running else ()
    results = read_results(record.sweep, record.runs, launches.causes, launches.hosts, training)
    by_name = {result.name: result for result in results}
    live: dict[str, Status] = {}
    others: dict[str, Status] = {}
    for run in record.runs:
        if by_name[run.name].state is State.BEGUN:
            try:
                status = run_status(run.directory)
            except DataError:
                continue  # its command has not come to its first event
            if status["state"] in GOING_ON:
                live[run.name] = status
    for directory in sorted(record.sweep.directory.glob("*/")):
        if directory.name not in by_name:
            try:
                others[directory.name] = run_status(directory)
            except DataError:
                continue  # not a run
    left = _time_left(record, by_name, live)
    return SweepProgress(record, is_running, results, live, left, others)


# -- the time that is left


def _time_left(record: SweepRecord, results: Mapping[str, RunResult], live: Mapping[str, Status]) -> TimeLeft | None:
    """Return the time until the last run ends, if each goes to the first free place in their order."""
    whole, basis = _seconds_of_runs(record, results, live)
    places: list[float] = []  # seconds until each is free
    waiting: list[float] = []
    for run in record.runs:
        result = results[run.name]
        if result.state.has_ended:
            continue
        seconds = whole.get(run.name)
        if run.name in live and live[run.name].get("seconds_left") is not None:
            places.append(live[run.name]["seconds_left"])
        elif seconds is None:
            return None
        else:
            waiting.append(seconds * (1 - result.step / max(1, run.steps)))
    if not places and not waiting:
        return None
    while len(places) < record.places:
        places.append(0.0)
    heapq.heapify(places)
    for seconds in waiting:
        heapq.heapreplace(places, places[0] + seconds)
    return TimeLeft(max(places), basis)


def _seconds_of_runs(
    record: SweepRecord, results: Mapping[str, RunResult], live: Mapping[str, Status]
) -> tuple[Mapping[str, float], str]:
    """Return the estimated seconds of whole runs by name, and what they follow from, in words.

    A run takes as long as its operations at the speed of the runs that are done, whose seconds are those of their
    places: with starts, evaluations and checkpoints. Before the first one is done, the speed is that of the steps in
    training; before the first step, of the plan.
    """
    seconds = 0.0
    operations = 0.0
    count = 0
    for run in record.runs:
        took = record.launches.seconds.get(run.name)
        result = results[run.name]
        if result.state is State.DONE and took is not None and run.operations is not None:
            # A start whose sweep was killed is not in its record, but its steps are in the metrics.
            seconds += max(took, result.seconds or 0.0)
            operations += run.operations
            count += 1
    basis = "from the runs that are done"
    if count:
        basis += f", which took {duration(seconds / count)} each on average"
    else:
        basis = "from the speed of the steps in training, without starts and evaluations"
        for run in record.runs:
            per_step = live.get(run.name, {}).get("seconds_per_step")
            if per_step is not None and run.operations is not None:
                seconds += per_step * run.steps
                operations += run.operations
    if not operations:
        basis = "as planned"
    found: dict[str, float] = {}
    for run in record.runs:
        if operations and run.operations is not None:
            found[run.name] = run.operations * seconds / operations
        elif not operations and run.planned_seconds is not None:
            found[run.name] = run.planned_seconds
    return found, basis


# -- how it is shown


def progress_json(progress: SweepProgress) -> Status:
    """Return progress as one JSON object."""
    sweep = progress.record.sweep
    steps = {run.name: run.steps for run in progress.record.runs}
    rows = []
    for result in progress.results:
        row: Status = {**asdict(result), "state": result.state.value, "steps": steps[result.name]}
        row["live"] = _shown(progress.live.get(result.name))
        rows.append(row)
    status: Status = {
        "directory": str(sweep.directory),
        "time": time.time(),
        "name": sweep.name,
        "state": progress.state,
        "counts": progress.counts,
        "runs": rows,
        "best": None,
        "seconds_left": None,
        "left_basis": None,
        "places": progress.record.places,
        "following": sweep.following,
        "other_runs": {name: _shown(other) for name, other in progress.others.items()},
        "files": _files(sweep.directory),
    }
    best = progress.results[0]
    if best_words(sweep, progress.results):
        status["best"] = {"run": best.name, "value": best.score, "of": best.score_of, "step": best.score_step}
    if progress.left is not None:
        status |= {"seconds_left": progress.left.seconds, "left_basis": progress.left.basis}
    return status


def _shown(status: Status | None) -> Status | None:
    """Return what is shown of the status of a run; None without one."""
    if status is None:
        return None
    return {key: status.get(key) for key in _LIVE_KEYS}


def format_progress(progress: SweepProgress) -> str:
    """Format progress for a terminal: the table, then what no table has room for."""
    sweep = progress.record.sweep
    counts = [f"{count} {state}" for state, count in progress.counts.items() if count]
    lines = [f"{sweep.directory}: {progress.state}, {len(progress.results)} runs: {', '.join(counts)}"]
    lines.append(format_table(sweep, progress.results))
    for name, status in progress.live.items():
        lines.append(f"in training: {name}: {progress_words(status)}")
    for result in progress.results:
        if result.cause:
            lines.append(f"{result.state.value}: {result.name}: {result.cause}")
    lines += best_words(sweep, progress.results)
    if progress.left is not None:
        at_a_time = "one run"
        if progress.record.places > 1:
            at_a_time = f"{progress.record.places} runs"
        lines.append(f"left: about {duration(progress.left.seconds)}, {at_a_time} at a time, {progress.left.basis}")
    elif not all(result.state.has_ended for result in progress.results):
        lines.append("left: not known before the first steps of a run")
    if sweep.following:
        lines.append(f"then {sweep.following} runs follow, whose values these decide; their time is not included")
    for name, status in progress.others.items():
        lines.append(f"other run here: {name}: {progress_words(status)}")
    if progress.state == "stopped":
        lines.append("nothing trains; the command that began it goes on")
    files = _files(sweep.directory)
    if files:
        lines.append("  ".join(files))
    return "\n".join(lines)


def _files(directory: Path) -> list[str]:
    """Return the paths of the results that are there."""
    found = []
    for name in _RESULTS:
        if (directory / name).exists():
            found.append(str(directory / name))
    return found
