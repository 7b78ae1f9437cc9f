#!/usr/bin/env python3
"""Time of `deepy.py --dry-run` for 20B, in turn with another commit and with an import of pydantic and PyYAML alone.

    python benchmarks/dry_run.py --before ee722dc9 --repeat 10

Each program runs with Python's bytecode written before, as an installed package has it, and with
PYTHONDONTWRITEBYTECODE, where every start compiles the library again (and pydantic, if it was installed like that).
Wall time grows with other work on the machine; CPU time (user and system, `os.times`) hardly does, so compare that on a
busy machine.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from io import BytesIO
from pathlib import Path
from statistics import median
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
_DEPENDENCIES = "pydantic and PyYAML"


class Seconds(NamedTuple):
    """Wall time and CPU time of one process."""

    wall: float
    cpu: float


def run_process(command: list[str], directory: Path, bytecode: Path | None) -> Seconds:
    """Run a command and time it.

    Args:
        command: The command.
        directory: Its working directory, from which the library is imported.
        bytecode: Directory of the bytecode; None to run without any.
    """
    environment = {**os.environ, "PYTHONPATH": str(directory)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    if bytecode is None:
        environment["PYTHONDONTWRITEBYTECODE"] = "1"
    else:
        environment["PYTHONPYCACHEPREFIX"] = str(bytecode)
    before = os.times()
    started = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, cwd=directory, env=environment)
    wall = time.perf_counter() - started
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return Seconds(wall, cpu)


def extract_commit(commit: str, directory: Path) -> None:
    """Write the files of a commit to a directory."""
    archive = subprocess.run(["git", "archive", commit], check=True, capture_output=True, cwd=ROOT).stdout
    with tarfile.open(fileobj=BytesIO(archive)) as files:
        files.extractall(directory, filter="data")


def main() -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", help="commit to compare with")
    parser.add_argument("--hosts", type=int, default=12, help="hosts of 8 GPUs")
    parser.add_argument("--repeat", type=int, default=10, help="runs of each program, in turn")
    arguments = parser.parse_args()
    dry_run = [sys.executable, "deepy.py", "train.py", "-d", "configs", "20B.yml"]
    dry_run += ["--hosts", str(arguments.hosts), "--gpus", "8", "--dry-run"]
    with tempfile.TemporaryDirectory() as name:
        temporary = Path(name)
        programs = {_DEPENDENCIES: ([sys.executable, "-c", "import pydantic, yaml"], ROOT)}
        if arguments.before is not None:
            extract_commit(arguments.before, temporary / "before")
            programs[arguments.before] = (dry_run, temporary / "before")
        programs["now"] = (dry_run, ROOT)
        for title, bytecode in (("with bytecode", temporary / "bytecode"), ("without bytecode", None)):
            for command, directory in programs.values():
                run_process(command, directory, bytecode)  # writes the bytecode, and reads all files once
            runs: dict[str, list[Seconds]] = {program: [] for program in programs}
            for _ in range(arguments.repeat):
                for program, (command, directory) in programs.items():
                    runs[program].append(run_process(command, directory, bytecode))
            _print_runs(title, runs, arguments.before)
    return 0


def _print_runs(title: str, runs: dict[str, list[Seconds]], before: str | None) -> None:
    """Print the least and the median seconds of each program, and the ratio of the two commits."""
    print(f"{title:24}   wall: least  median    CPU: least  median")
    figures: dict[str, tuple[float, ...]] = {}
    for program, seconds in runs.items():
        wall = [run.wall for run in seconds]
        cpu = [run.cpu for run in seconds]
        figures[program] = (min(wall), median(wall), min(cpu), median(cpu))
        print("  {:24} {:10.2f} {:7.2f} {:12.2f} {:7.2f}".format(program, *figures[program]))
    if before is not None:
        ratios = [now / then for now, then in zip(figures["now"], figures[before], strict=True)]
        print("  {:24} {:10.2f} {:7.2f} {:12.2f} {:7.2f}".format("now / before", *ratios))


if __name__ == "__main__":
    sys.exit(main())
