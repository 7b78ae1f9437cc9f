"""Restarts by `deepy.py`: a training whose ranks die, which goes on, and failures that end it."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from neox.run_events import read_events
from tests.end_to_end.launched_runs import ROOT, LaunchedRun

DATA = ROOT / "tests" / "golden" / "data" / "small_text_document"
# It counts its starts, and fails at those that `NEOX_FAILURES` lists: `kill`, `refuse` or `full`.
TRAINING = """
import os, signal, sys, time
from pathlib import Path
from neox.launch import Cause, FailureReport, report_failure, report_progress

rank = int(os.environ["RANK"])
log = Path(os.environ["NEOX_RUN_DIRECTORY"]) / f"starts.{rank}"
start = len(log.read_text()) if log.exists() else 0
log.write_text("x" * (start + 1))
report_progress(start + 3)
failures = os.environ["NEOX_FAILURES"].split()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # as if it had saved
print(f"rank {rank} is up", flush=True)
if start >= len(failures):
    sys.exit(0)
if rank == 1:
    time.sleep(0.3)
    if failures[start] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if failures[start] == "full":
        report_failure(FailureReport(Cause.DISK_FULL, 4))
        sys.exit(1)
    if failures[start] == "refuse":
        print("error: refused", file=sys.stderr)
        sys.exit(2)
time.sleep(600)
"""


def start(directory: Path, failures: str, *arguments: str) -> LaunchedRun:
    """Start a training whose ranks fail as listed."""
    settings = (f"data_path={DATA}", f"save={directory / 'save'}", "launcher=local", "hang_timeout=60")
    words = [word for setting in settings for word in ("--set", setting)]
    return LaunchedRun(directory, [*words, *arguments], script=TRAINING, name="train.py", NEOX_FAILURES=failures)


def ends(run: LaunchedRun) -> list[dict[str, Any]]:
    return [event for event in read_events(run.directory / "run") if event["event"] == "end"]


def test_a_run_is_started_again_or_its_failure_says_how(tmp_path: Path, runs: list[LaunchedRun]) -> None:
    healed = start(tmp_path / "healed", "kill kill", "--max-restarts", "3")
    off = start(tmp_path / "off", "kill")
    runs += [healed, off]
    outputs = [run.output(60) for run in runs]
    assert [run.process.returncode for run in runs] == [0, 128 + signal.SIGKILL], outputs
    decisions = [end["decision"] for end in ends(healed)]
    assert (decisions[0], decisions[2:]) == ("restart", ["stop"])
    assert decisions[1].startswith("restart after")  # the same rank, soon after its start
    first = ends(healed)[0]
    assert (first["host"], first["rank"], first["step"]) == ("localhost", 1, 3)
    assert ["--max-restarts N" in output for output in outputs] == [False, True]
    assert [end["decision"] for end in ends(off)] == ["stop"]
    for run in runs:
        assert not run.pids()


@pytest.mark.slow
def test_failures_that_end_a_run(tmp_path: Path, runs: list[LaunchedRun]) -> None:
    used = start(tmp_path / "used", "kill kill", "--max-restarts", "1")
    refused = start(tmp_path / "refused", "kill refuse", "--max-restarts", "3")
    full = start(tmp_path / "full", "full", "--max-restarts", "3")
    notice = ("--set", "preemption_command=test -e notice", "--set", "preemption_seconds=0.2", "--max-restarts", "3")
    taken = start(tmp_path / "taken", "wait", *notice)
    runs += [used, refused, full, taken]
    taken.wait_up()
    (taken.directory / "notice").touch()
    outputs = {run.mark: run.output(60) for run in runs}
    codes = [run.process.returncode for run in runs]
    killed = 128 + signal.SIGKILL
    assert codes == [killed, 2, 1, 0], outputs
    assert [len(ends(run)) for run in runs] == [2, 2, 1, 1]
    assert (ends(taken)[0]["kind"], ends(taken)[0]["decision"]) == ("preempted", "stop")
    assert ends(full)[0]["reported"] == "disk full"
    for run in runs:
        assert not run.pids()


@pytest.mark.slow
def test_a_signal_in_a_pause_ends_the_launcher(tmp_path: Path, runs: list[LaunchedRun]) -> None:
    run = start(tmp_path / "pausing", "kill " * 20, "--max-restarts", "20")
    runs.append(run)
    run.wait_up(2)
    while len(ends(run)) < 3:
        assert run.process.poll() is None
        os.sched_yield()
    run.process.send_signal(signal.SIGTERM)
    run.output(20)
    assert run.process.returncode in (-signal.SIGTERM, 128 + signal.SIGTERM)
    assert not run.pids()
