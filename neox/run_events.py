"""Event log of a run, `events.jsonl` in its run directory: starts, failures, and decisions about restarts.

Each line is a JSON object with `time` (seconds since the epoch) and `event`. Other fields are null or missing if they
are unknown: `host`, `rank`, `cause`, `step`, `decision`, `reason`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

EVENTS_FILE = "events.jsonl"
"""Name of the file in a run directory."""
LEFT_OUT = "host left out"
"""Name of the event of a host that does not take part in the start that follows."""
NOT_STARTED = "not started"
"""Kind of an end without a start: a host did not answer, and the launcher tries again."""


def append_event(directory: Path, event: str, **fields: Any) -> None:
    """Append an event. It begins a new line, even if the line before it is incomplete.

    Args:
        directory: The run directory.
        event: Name of the event, one or two words.
        fields: Further fields of the line.

    Raises:
        OSError: The file cannot be written.
    """
    line = json.dumps({"time": round(time.time(), 3), "event": event, **fields}) + "\n"
    descriptor = os.open(directory / EVENTS_FILE, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        if _is_line_incomplete(descriptor):
            line = "\n" + line
        _write_all(descriptor, line.encode())
    finally:
        os.close(descriptor)


def _is_line_incomplete(descriptor: int) -> bool:
    """Return whether a file ends within a line, which a kill or a full disk has cut off."""
    size = os.fstat(descriptor).st_size
    return size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"


def _write_all(descriptor: int, data: bytes) -> None:
    """Write all bytes. The kernel may take fewer at once."""
    while data:
        written = os.write(descriptor, data)
        data = data[written:]


def of_newest_run(events: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return the events since a command last began a run from the beginning; all if none is known to have done so.

    The metrics of an earlier run in the same directory are in other files, which these events do not belong to.
    """
    first = 0
    for number, event in enumerate(events):
        if event["event"] == "start" and event.get("restart") == 0 and event.get("step") is None:
            first = number
    while first > 0 and events[first - 1]["event"] == LEFT_OUT:  # recorded just before a start
        first -= 1
    return events[first:]


def interruptions(events: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the ends after which the run was started again, in order.

    These are the `end` events with a restart, and a made-up one before each start whose predecessor has no end: its
    launcher was killed.
    """
    found: list[Mapping[str, Any]] = []
    is_running = False
    for event in events:
        if event["event"] == "start":
            if is_running:
                found.append(_end_of_launcher(event["time"]))
            is_running = True
        elif event["event"] == "end":
            is_running = False
            if event.get("kind") != NOT_STARTED and str(event.get("decision")).startswith("restart"):
                found.append(event)
    return found


def _end_of_launcher(next_start: float) -> Mapping[str, Any]:
    """Return the end of a start whose launcher was killed. Only the time of the next start is known."""
    return {
        "time": next_start,
        "event": "end",
        "cause": "the launcher was killed",
        "step": None,
        "decision": "the same command was run again",
    }


def rollbacks(events: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the loss spikes after which the run went back to a checkpoint, in order."""
    found = []
    for event in events:
        if event["event"] == "loss spike" and event.get("back_to") is not None:
            found.append(event)
    return found


def read_events(directory: Path) -> list[dict[str, Any]]:
    """Return the events of a run in the order of the file. Incomplete lines are skipped.

    Args:
        directory: The run directory.
    """
    path = directory / EVENTS_FILE
    if not path.exists():
        return []
    events = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            event = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(event, dict) and {"time", "event"} <= event.keys():
            events.append(event)
    return events
