"""Record of a sweep in its directory: its runs, and what only the process that trains them knows of them.

Whoever looks at the directory (`tools/status.py`, `--report`) reads it there, without the sweep's file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from neox.errors import DataError
from neox.files import write_text
from neox.resume import is_output_locked
from tools.sweep.run_files import RunFiles
from tools.sweep.sweep_file import Sweep, SweepRun

RECORD_FILE = "sweep.json"
"""Name of the record in the directory of a sweep."""


@dataclass
class Launches:
    """What the process that trains the runs of a sweep knows of them, by their names.

    Attributes:
        hosts: Hosts of the last starts; empty for the hosts of the configuration.
        causes: Reasons of the last failures.
        seconds: Seconds for which each run had its place, over all starts.
        training: Names of the runs whose commands are running, as long as the process is there.
    """

    hosts: dict[str, str] = field(default_factory=dict)
    causes: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    training: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class SweepRecord:
    """A sweep as its directory shows it.

    Attributes:
        sweep: The sweep, without its configuration.
        runs: Its runs.
        places: Number of runs that are trained at a time.
        launches: What is known of the launches of the runs.
    """

    sweep: Sweep
    runs: tuple[RunFiles, ...]
    places: int
    launches: Launches

    @property
    def is_running(self) -> bool:
        """Whether a process trains the runs at this moment."""
        directory = self.sweep.directory
        return is_output_locked(lock_prefix(self.sweep)) or is_output_locked(ladder_lock_prefix(directory))


def lock_prefix(sweep: Sweep) -> str:
    """Return the path of the lock, without its suffix, that the process holds which trains the runs."""
    return str(sweep.directory / "sweep")


def ladder_lock_prefix(directory: Path) -> str:
    """Return the same of the process that works on a ladder, also between its stages."""
    return str(directory / "ladder")


def is_sweep(directory: Path) -> bool:
    """Return whether a directory is that of a sweep or a ladder."""
    return (directory / RECORD_FILE).is_file()


def earlier_record(sweep: Sweep) -> SweepRecord | None:
    """Return the record that an earlier call has left in the directory of a sweep; None if there is none to read."""
    try:
        return read_record(sweep.directory)
    except DataError:
        return None


def write_record(sweep: Sweep, runs: Sequence[RunFiles], places: int, launches: Launches) -> None:
    """Write the record of a sweep into its directory. Raises OSError."""
    described: list[Mapping[str, Any]] = []
    for run in runs:
        described.append(
            {
                "name": run.name,
                "values": dict(run.run.values),
                "steps": run.steps,
                "is_evaluated": run.is_evaluated,
                "operations": run.operations,
                "planned_seconds": run.planned_seconds,
            }
        )
    record = {
        "name": sweep.name,
        "metric": sweep.metric,
        "goal": sweep.goal,
        "compares": sweep.compares,
        "following": sweep.following,
        "places": places,
        "runs": described,
        "launches": asdict(launches),
    }
    write_text(sweep.directory / RECORD_FILE, json.dumps(record, indent=1) + "\n")


def read_record(directory: Path) -> SweepRecord:
    """Read the record of a sweep.

    Args:
        directory: The directory of the sweep.

    Raises:
        DataError: It has no record, or one that cannot be read.
    """
    file = directory / RECORD_FILE
    runs: list[RunFiles] = []
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        for described in record["runs"]:
            name = described["name"]
            runs.append(
                RunFiles(
                    run=SweepRun(name, described["values"]),
                    directory=directory / name,
                    steps=described["steps"],
                    is_evaluated=described["is_evaluated"],
                    operations=described["operations"],
                    planned_seconds=described["planned_seconds"],
                )
            )
        sweep = Sweep(
            name=record["name"],
            directory=directory,
            configs=(),
            runs=tuple(run.run for run in runs),
            metric=record["metric"],
            goal=record["goal"],
            compares=record["compares"],
            following=record["following"],
        )
        return SweepRecord(sweep, tuple(runs), record["places"], Launches(**record["launches"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{file} is no record of a sweep ({error!r}); tools/sweep.py or tools/ladder.py writes it again when it "
            "goes on"
        ) from error
