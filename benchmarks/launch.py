#!/usr/bin/env python3
"""Figures of the launcher: start and end of a training, end after a rank's death, orphans after random kills.

    python benchmarks/launch.py --kills 20 --random 100 --out benchmarks/results/launch.json

Start and end are those of a tiny training on one rank, each after an `import deepspeed` in a process of its own.
In the other runs ranks are dummies without torch. A run counts as cleanly ended when its last process is gone,
grandchildren included; an orphan is any process of a run that lives ten seconds after one of its processes (launcher,
agent, watchdog, a rank: equally often) was killed at a random moment of its start or its life.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.end_to_end.launched_runs import ROLES, ROOT, LaunchedRun, command_line


def start_and_end(directory: Path, repeat: int) -> list[dict[str, float]]:
    """Seconds of `import deepspeed`, from a command to its first step, and from its last line to its end."""
    data = ROOT / "tests" / "golden" / "data" / "small_text_document"
    arguments = [word for key in (f"data_path={data}", "train_iters=3", "log_interval=1") for word in ("--set", key)]
    found = []
    for _ in range(repeat):
        started = time.monotonic()
        subprocess.run([sys.executable, "-c", "import deepspeed"], check=True, capture_output=True)
        imported = time.monotonic() - started
        run = LaunchedRun(directory, arguments, ranks=1, script=None)
        assert run.process.stdout is not None
        first = last = 0.0
        for line in run.process.stdout:
            last = time.monotonic()
            first = first or (last if re.search(r"iteration +1/", line) else 0.0)
        if run.process.wait() or not first:
            raise RuntimeError(f"the training failed: {run.directory}")
        figures = {"import_deepspeed": imported, "first_step": first - run.started, "end": time.monotonic() - last}
        found.append({key: round(seconds, 2) for key, seconds in figures.items()})
    return found


def kill_a_rank(directory: Path) -> tuple[float, int]:
    """Seconds from kill -9 of a random rank until nothing of the run lives; and its exit status."""
    run = LaunchedRun(directory, NEOX_DUMMY_CHILD="1")
    try:
        run.wait_up()
        os.kill(run.rank_pid(random.randrange(2)), signal.SIGKILL)
        killed = time.monotonic()
        run.output(30)
        run.seconds_until_gone(30)
        return time.monotonic() - killed, run.process.returncode
    finally:
        run.end()


def kill_at_random(directory: Path) -> tuple[str, int]:
    """Kill -9 a process of a random role at a random moment of its life; the role, and who lives ten seconds later."""
    run = LaunchedRun(directory, NEOX_DUMMY_CHILD="1")
    try:
        role = random.choice(list(ROLES))
        while not (alive := run.pids(role)):
            time.sleep(0.02)
        time.sleep(random.choice([0.0, random.uniform(0, 1), random.uniform(0, 8)]))
        victim = random.choice(run.pids(role) or alive)
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while run.pids() and time.monotonic() < deadline:
            time.sleep(0.05)
        orphans = run.pids()
        for pid in orphans:
            print(f"orphan after killing {role}: {command_line(pid)}", file=sys.stderr)
        return role, len(orphans)
    finally:
        run.end()
        run.process.communicate()


def main() -> int:
    """Measure, print, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="runs whose rank is killed")
    parser.add_argument("--random", type=int, default=100, help="runs of which any process is killed at any moment")
    parser.add_argument("--at-once", type=int, default=2, help="randomly killed runs at a time")
    parser.add_argument("--starts", type=int, default=5, help="trainings that are started")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON file for the figures")
    arguments = parser.parse_args()
    random.seed(arguments.seed)
    figures: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "cores": os.cpu_count()}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        figures["start_and_end_seconds"] = start_and_end(directory, arguments.starts)
        ends = [kill_a_rank(directory) for _ in range(arguments.kills)]
        if ends:
            seconds = [end for end, _ in ends]
            figures["rank_killed"] = {
                "runs": len(ends),
                "median_seconds": round(statistics.median(seconds), 2),
                "max_seconds": round(max(seconds), 2),
                "exit_statuses": sorted({code for _, code in ends}),
            }
        with ThreadPoolExecutor(arguments.at_once) as pool:
            killed = list(pool.map(lambda _: kill_at_random(directory), range(arguments.random)))
        roles = [role for role, _ in killed]
        figures["random_kills"] = {
            "runs": len(killed),
            "by_role": {role: roles.count(role) for role in sorted(set(roles))},
            "orphans": sum(orphans for _, orphans in killed),
        }
    print(json.dumps(figures, indent=2))
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
