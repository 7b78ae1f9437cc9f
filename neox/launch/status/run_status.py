"""Status of a run, computed from the files of its run directory."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping, Sequence
from operator import sub
from pathlib import Path
from statistics import mean, median
from typing import Any

from neox.launch.agent.agent_files import read_pids
from neox.launch.processes import is_alive, process_start
from neox.launch.run_lock import LOCK_FILE, is_training
from neox.launch.status.run_paths import find_run_directory
from neox.metrics import METRICS_FILE, Curves, curves, is_step, read_metrics
from neox.run_events import interruptions, of_newest_run, read_events, rollbacks

_LAST_STEPS = 50
"""Steps whose median is the speed of a run. The first step of each start, which compiles and warms up, is left out."""
_MOST_POINTS = 400  # of each curve on the page
SPEED_IS = "median of the last steps without the first of a start"
"""Words for the speed of a status."""
_SLOW_HOST = "runtime/slow_host/"
_SHOWN_INTERRUPTIONS = 10  # in the text format
GOING_ON = ("starting", "running", "restarting")
"""States in which steps will follow."""

_COARSE_TIMES = 0.01  # seconds by which a kernel's times of files may be behind its clock
_EVALUATIONS_OF_A_RISE = 2  # after the lowest one: a single one above it is often followed by a lower one
_RISE = 0.01  # share of the lowest loss: less is a loss that no longer falls

Status = dict[str, Any]


def run_status(directory: Path) -> Status:
    """Return the status of a run as JSON.

    Args:
        directory: A path that names the run, as `find_run_directory` takes it.

    Raises:
        DataError: The path names no run.
    """
    directory = find_run_directory(directory)
    events = of_newest_run(read_events(directory))
    metrics = directory / METRICS_FILE
    rows = _last_steps(metrics)
    starts = [event for event in events if event["event"] == "start"]
    status_of_launch = _state(directory, events)
    progress = _progress(rows, _planned_steps(directory), starts)
    hosts = _hosts(directory, starts, rows)
    if status_of_launch["state"] not in GOING_ON:
        progress["seconds_left"] = None
        for host in hosts:
            host["pids"] = {}  # other processes may have them by now
    losses = _curves(metrics)
    status: Status = {
        "directory": str(directory),
        "time": time.time(),
        **status_of_launch,
        **progress,
        "validation": _validation(losses),
        "curves": {name: _thinned(points) for name, points in losses.items()},
        "hosts": hosts,
        "starts": len(starts),
        "interruptions": _interruptions(events),
        "rollbacks": [event["step"] for event in rollbacks(events)],
        "other_events": [event for event in events if event["event"] not in ("start", "end")],
        "silent_seconds": _age(metrics),
    }
    return status


def _state(directory: Path, events: Sequence[Mapping[str, Any]]) -> Status:
    """Return `state`, one word, and `reason`, which explains why the run has ended."""
    last = next((event for event in reversed(events) if event["event"] in ("start", "end")), None)
    if last is None:
        return {"state": "unknown", "reason": "events.jsonl is missing or empty"}
    if last["event"] == "start" or str(last["decision"]).startswith("restart"):
        if _launcher_is_gone(directory):
            return {"state": "ended", "reason": "the launcher was killed; run the same command again to resume"}
        if last["event"] == "start":
            return {"state": _state_of_start(directory / METRICS_FILE, last["time"]), "reason": None}
        return {"state": "restarting", "reason": last["reason"]}
    states = {"finished": "finished", "asked to end": "stopped", "preempted": "preempted"}
    state = states.get(str(last.get("kind")), "failed")
    if state == "finished" and last.get("status"):
        state = "failed"
    reasons = [text for text in (last.get("cause"), last.get("reason")) if text]
    return {"state": state, "reason": "; ".join(reasons) or None}


def _state_of_start(metrics: Path, started_at: float) -> str:
    """Return `starting` until the first step of the newest start, then `running`. Without metrics it is not known."""
    if not metrics.exists():
        return "running"
    file = metrics.stat()
    if file.st_size > 0 and file.st_mtime > started_at - _COARSE_TIMES:
        return "running"
    return "starting"


def _launcher_is_gone(directory: Path) -> bool:
    """Return whether the training's launcher was on this machine and has ended.

    It holds the lock of the run directory as long as it lives. If another script, such as generate.py, holds or held
    the lock after it, then it has ended, whether or not that script still runs.
    """
    try:
        holder = json.loads((directory / LOCK_FILE).read_text())
        if holder["host"] != socket.gethostname():
            return False
        if not is_training(holder["script"]):
            return True
        pid = int(holder["pid"])
        began = process_start(pid)
        return not is_alive(pid) or holder.get("pid_since", began) != began  # its process id may be reused
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _planned_steps(directory: Path) -> int | None:
    """Return the planned number of steps of the run; None if unknown."""
    try:
        lines = (directory / "config.yml").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip().replace("-", "_") == "train_iters" and value.strip().isdecimal():
            return int(value)
    return None


def _last_steps(metrics: Path) -> list[dict[str, Any]]:
    """Return the metrics of the last steps."""
    if not metrics.exists():
        return []
    steps = [row for row in read_metrics(metrics) if is_step(row)]
    return steps[-_LAST_STEPS:]


def _validation(losses: Curves) -> list[Status]:
    """Return for each loss on validation data its last and its lowest value, and whether the model overfits since then.

    It does if the loss on validation data has risen above its lowest value, while the training loss has fallen: its
    mean over the steps in the second half of the time from one evaluation to the next, before each of both.
    """
    training: Mapping[int, float] = {}
    found: list[Status] = []
    for name, points in losses.items():
        if name.startswith("train/") and not training:
            training = points
    for name, points in losses.items():
        if not name.startswith("validation/"):
            continue
        last = max(points)
        lowest = min(points, key=lambda step: (points[step], step))
        values: Status = {"name": name, "step": last, "loss": points[last]}
        values |= {"lowest_step": lowest, "lowest": points[lowest]}
        evaluated = sorted(points)
        apart = min(map(sub, evaluated[1:], evaluated), default=0)
        then = _mean_before(training, lowest, apart / 2)
        now = _mean_before(training, last, apart / 2)
        values |= {"training_then": then, "training_now": now}
        later = len(points) - 1 - sorted(points).index(lowest)
        has_risen = later >= _EVALUATIONS_OF_A_RISE and points[last] > (1 + _RISE) * points[lowest]
        falls = then is not None and now is not None and now < then
        found.append({**values, "overfits": has_risen and falls})
    return found


def _mean_before(points: Mapping[int, float], step: int, reach: float) -> float | None:
    """Return the mean of a curve over some steps up to one; None if it has none.

    Args:
        points: The curve.
        step: The last step; 0 for the start, of which the first steps say most.
        reach: Number of steps of the mean, or a twentieth of all if that is more: single ones of short runs are noise.
    """
    if not points:
        return None
    reach = max(reach, len(points) / 20)
    end = max(step, min(points) + reach - 1)
    near = [value for each, value in points.items() if end - reach < each <= end]
    return mean(near) if near else None


def _curves(metrics: Path) -> Curves:
    if not metrics.exists():
        return {}
    return curves(metrics)


def _progress(rows: Sequence[Mapping[str, Any]], planned: int | None, starts: Sequence[Mapping[str, Any]]) -> Status:
    """Return the progress and the speed of the run, from its last steps. What their rows do not tell is None."""
    if not rows:
        return {"step": None, "steps": planned, "loss": None, "seconds_per_step": None, "tokens_per_second": None}
    last = rows[-1]
    first_steps = {1}
    for start in starts:
        first_steps.add((start.get("step") or 0) + 1)
    timed = [row for row in rows if row["iteration"] not in first_steps] or rows
    seconds = _median(timed, "runtime/iteration_time")
    loss = None
    for row in reversed(rows):  # a step without labels has none
        loss = next((value for name, value in row.items() if name.startswith("train/")), None)
        if loss is not None:
            break
    progress: Status = {
        "step": last["iteration"],
        "steps": planned,
        "loss": loss,
        "seconds_per_step": seconds,
        "tokens_per_second": _median(timed, "runtime/tokens_per_sec"),
    }
    if planned is not None and seconds is not None:
        progress["seconds_left"] = max(0, planned - last["iteration"]) * seconds
    return progress


def _median(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """Return the median of a scalar; None if no row has it."""
    values = [row[name] for row in rows if isinstance(row.get(name), int | float)]
    return median(values) if values else None


def _hosts(
    directory: Path, starts: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the hosts of the last start: seconds since their ranks last printed, slowness, and process ids by rank."""
    slow: dict[str, float] = {}
    for row in rows:
        for name, value in row.items():
            if name.startswith(_SLOW_HOST):
                slow[name.removeprefix(_SLOW_HOST)] = value
    hosts: list[dict[str, Any]] = []
    if not starts:
        return hosts
    for name in starts[-1]["hosts"]:
        logs = list((directory / "ranks" / name).glob("rank_*.log"))
        ages = [age for age in map(_age, logs) if age is not None]
        host: dict[str, Any] = {"name": name, "silent_seconds": min(ages, default=None), "slower": slow.get(name)}
        hosts.append({**host, "pids": read_pids(directory / "ranks" / name)})
    return hosts


def _interruptions(events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the interruptions of the run, with the number of repeated steps and the time to the next start."""
    rows: list[Mapping[str, Any]] = []
    for event in interruptions(events):
        row = {key: event.get(key) for key in ("time", "kind", "host", "rank", "cause", "step", "decision", "reason")}
        starts = (other for other in events if other["event"] == "start" and other["time"] >= event["time"])
        next_start = next(starts, None)
        if next_start is not None:
            row["seconds_to_start"] = round(next_start["time"] - event["time"], 3)
            if event.get("step") is not None:
                row["steps_again"] = event["step"] - (next_start["step"] or 0)
        rows.append(row)
    return rows


def _age(path: Path) -> float | None:
    """Return the seconds since a file was written; None if it does not exist."""
    try:
        return max(0.0, time.time() - path.stat().st_mtime)
    except OSError:
        return None


def _thinned(points: Mapping[int, float]) -> list[tuple[int, float]]:
    """Return about `_MOST_POINTS` points of a curve in ascending order, including the first and the last one."""
    ascending = sorted(points.items())
    step = max(1, -(-len(ascending) // _MOST_POINTS))
    thinned = ascending[::step]
    if thinned and thinned[-1] != ascending[-1]:
        thinned.append(ascending[-1])
    return thinned


def format_status(status: Status) -> str:
    """Format a status for a terminal."""
    lines = [f"{status['directory']}: {status['state']}"]
    if status["reason"]:
        lines[0] += f" ({status['reason']})"
    if status["step"] is not None:
        lines.append(f"step        {_step_words(status)}")
        speeds = _speed_words(status)
        if speeds:
            lines.append(f"speed       {', '.join(speeds)} ({SPEED_IS})")
        for loss in status["validation"]:
            lines.append(f"validation  {_validation_words(loss)}")
        lines.append(f"last step   {duration(status['silent_seconds'])} ago")
    for host in status["hosts"]:
        activity = "nothing printed yet"
        if host["silent_seconds"] is not None:
            activity = f"printed {duration(host['silent_seconds'])} ago"
        if host["slower"]:
            activity += f", {host['slower']:.2f} times as slow as the others"
        lines.append(f"host        {host['name']}: {activity}")
        if host["pids"]:
            ranks = ", ".join(f"{rank}: {pid}" for rank, pid in host["pids"].items())
            lines.append(f"            process ids: {ranks}")
    interrupted = status["interruptions"]
    lines.append(f"starts      {status['starts']}, interruptions {len(interrupted)}")
    for event in interrupted[-_SHOWN_INTERRUPTIONS:]:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["time"]))
        lines.append(f"  {at}  {_interruption_words(event)}")
    for event in status["other_events"][-_SHOWN_INTERRUPTIONS:]:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["time"]))
        lines.append(f"  {at}  {_event_words(event)}")
    return "\n".join(lines)


def progress_words(status: Status) -> str:
    """Return the state, the step, the loss and the speed of a run in one line."""
    words = [status["state"]]
    if status["step"] is not None:
        words += [f"step {_step_words(status)}", *_speed_words(status)]
    return ", ".join(words)


def _step_words(status: Status) -> str:
    """Return the step and the loss of a run that has trained a step."""
    of_steps = ""
    if status["steps"]:
        of_steps = f" of {status['steps']}"
    return f"{status['step']}{of_steps}, loss {_number(status['loss'])}"


def _speed_words(status: Status) -> list[str]:
    """Return what is known of the speed of a run, and of the time that is left."""
    words = []
    if status["seconds_per_step"] is not None:
        words.append(f"{status['seconds_per_step']:.3g} s a step")
    if status["tokens_per_second"] is not None:
        words.append(f"{status['tokens_per_second']:,.0f} tokens/s")
    if status.get("seconds_left"):
        words.append(f"{duration(status['seconds_left'])} left")
    return words


def overfitting_words(directory: Path) -> list[str]:
    """Return a line for each loss on validation data by which a run overfits. Raises DataError without metrics."""
    lines = []
    for loss in run_status(directory)["validation"]:
        if loss["overfits"]:
            lines.append(f"{_validation_words(loss)} (docs/recipes/overfitting.md says what helps)")
    return lines


def _validation_words(loss: Mapping[str, Any]) -> str:
    """Return the last and the lowest value of a loss on validation data, in a line."""
    line = f"{loss['name']} {_number(loss['loss'])} at step {loss['step']}"
    if loss["lowest_step"] != loss["step"]:
        line += f", the lowest {_number(loss['lowest'])} at step {loss['lowest_step']}"
    if loss["overfits"]:
        line += (
            f"; the training loss went from {_number(loss['training_then'])} to {_number(loss['training_now'])} "
            "since then: overfitting"
        )
    return line


def _interruption_words(event: Mapping[str, Any]) -> str:
    """Return what is known of an interruption: its step, its cause or at least its kind, and the decision."""
    cause = event["cause"] or event["kind"] or "unknown cause"
    words = f"{cause}; {event['decision']}"
    if event["step"] is None:
        return words
    return f"step {event['step']}: {words}"


def _event_words(event: Mapping[str, Any]) -> str:
    """Return what is known of another event: its name, its host, and its reason or cause."""
    words = str(event["event"])
    if event.get("host"):
        words += f" {event['host']}"
    known = [event.get(key) for key in ("cause", "decision", "reason")]
    texts = [str(text) for text in known if text]
    if texts:
        words += f": {'; '.join(texts)}"
    return words


def _number(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def duration(seconds: float) -> str:
    """Format a duration, such as `3 h 12 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes = whole // 60
    if minutes < 60:
        return f"{minutes} min {whole % 60} s"
    hours = minutes // 60
    if hours < 24:
        return f"{hours} h {minutes % 60} min"
    return f"{hours // 24} d {hours % 24} h"
