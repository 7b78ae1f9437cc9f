"""What the files of a run of a sweep say: whether it is done, where its metrics are, how it ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from neox.errors import DataError
from neox.launch.agent.agent_files import Cause
from neox.launch.status.run_status import run_status
from neox.launch.supervisor.outcome import EndKind
from neox.metrics import METRICS_FILE
from neox.preflight.resume_notes import lacks_last_evaluation
from neox.run_events import of_newest_run, read_events
from tools.sweep.sweep_file import SweepRun

OUTPUT_FILE = "output.log"
"""File in the directory of a run with what its commands have printed."""


class State(Enum):
    """What a run of a sweep has come to; the value is its name in tables."""

    WAITING = "waiting"
    BEGUN = "begun"  # it was ended by a signal, or its launcher was killed: it will be resumed
    DONE = "done"
    DIVERGED = "diverged"  # its loss was not finite; that is a result
    FAILED = "failed"

    @property
    def has_ended(self) -> bool:
        """Whether nothing of the run is left to be trained, unless it is asked for again."""
        return self not in (State.WAITING, State.BEGUN)


@dataclass(frozen=True)
class RunFiles:
    """A run of a sweep, and what its files say of it.

    Attributes:
        run: Its name and values.
        directory: Its directory, which is its `log_dir`.
        steps: Number of its steps.
        is_evaluated: Whether it is evaluated on validation data.
        operations: Floating-point operations of its whole training; None if the number of its steps is not known yet.
        planned_seconds: Planned duration; None if it cannot be planned.
    """

    run: SweepRun
    directory: Path
    steps: int
    is_evaluated: bool = True
    operations: float | None = None
    planned_seconds: float | None = None

    @property
    def name(self) -> str:
        """Its name."""
        return self.run.name

    @property
    def metrics(self) -> Path:
        """Its metrics file."""
        return self.directory / METRICS_FILE

    def last_end(self, since: float = 0.0) -> Mapping[str, Any] | None:
        """Return the last recorded end of the run since a time in seconds; None if there is none.

        Ends of an earlier run in the same directory, which `--redo` replaced, do not count.
        """
        for event in reversed(of_newest_run(read_events(self.directory))):
            if event["time"] < since:
                return None
            if event["event"] == "end":
                return event
        return None

    def state(self) -> State:
        """Return what the run has come to, from the files in its directory."""
        end = self.last_end()
        goes_on = end is not None and str(end.get("decision")).startswith("restart")
        if end is not None and end.get("reported") == Cause.NOT_FINITE and not goes_on:
            return State.DIVERGED
        try:
            status = run_status(self.directory)
        except DataError:
            return State.FAILED if (self.directory / OUTPUT_FILE).exists() else State.WAITING
        if status["state"] == "finished" and (status["step"] or 0) >= self.steps:
            if lacks_last_evaluation(self.directory, is_evaluated=self.is_evaluated):
                return State.BEGUN
            return State.DONE
        if end is not None and status["state"] == "failed" and end.get("kind") != EndKind.HOST.value:
            return State.FAILED
        return State.BEGUN
