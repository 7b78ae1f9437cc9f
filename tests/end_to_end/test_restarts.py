"""Restarts by `deepy.py`: a training whose ranks die, which goes on, and failures that end it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from neox.checkpoint_files.manifest import write_manifest
from neox.run_events import read_events
from tests.end_to_end.launched_runs import ROOT, LaunchedRun

DATA = ROOT / "tests" / "golden" / "data" / "small_text_document"
# It counts its starts, and fails at those that `NEOX_FAILURES` lists: `kill`, `refuse`, `full` or `stale`.
TRAINING = """
import os, signal, sys, time
from pathlib import Path
from neox.launch import Cause, FailureReport, acknowledge_stop, report_failure, report_progress

rank = int(os.environ["RANK"])
log = Path(os.environ["NEOX_RUN_DIRECTORY"]) / f"starts.{rank}"
start = len(log.read_text()) if log.exists() else 0
log.write_text("x" * (start + 1))
report_progress(start + 3)
failures = os.environ["NEOX_FAILURES"].split()

def save(*_):
    acknowledge_stop()
    time.sleep(float(os.environ["NEOX_SAVE_SECONDS"]))
    if rank == 1 and os.environ["NEOX_FAILURES"] == "save":
        raise OSError("the checkpoint cannot be written")
    log.with_suffix(f".saved.{rank}").touch()
    sys.exit(0)

signal.signal(signal.SIGTERM, save)
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
    if failures[start] == "stale":
        from neox.plan import decode_payload
        plan = decode_payload(sys.argv[sys.argv.index("--payload") + 1])
        report_failure(FailureReport(Cause.STALE_START, checkpoint=plan.start.checkpoint))
        sys.exit(75)
    if failures[start] == "refuse":
        print("error: refused", file=sys.stderr)
        sys.exit(2)
time.sleep(600)
"""


def start(directory: Path, failures: str, *arguments: str, save_seconds: float = 0) -> LaunchedRun:
    """Start a training whose ranks fail as listed, and take some seconds to save."""
    settings = (f"data_path={DATA}", f"save={directory / 'save'}", "launcher=local", "hang_timeout=60")
    words = [word for setting in settings for word in ("--set", setting)]
    variables = {"NEOX_FAILURES": failures, "NEOX_SAVE_SECONDS": str(save_seconds)}
    return LaunchedRun(directory, [*words, *arguments], script=TRAINING, name="train.py", **variables)


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


def test_a_damaged_checkpoint_is_left_out_without_a_restart(tmp_path: Path, runs: list[LaunchedRun]) -> None:
    """The ranks have found the newest one damaged; `max_restarts` is 0."""
    save = tmp_path / "damaged" / "save"
    for step in (10, 20):
        (save / f"global_step{step}").mkdir(parents=True)
        write_manifest(save / f"global_step{step}", step, step)
    (save / "latest").write_text("global_step20")
    run = start(tmp_path / "damaged", "stale", "--set", f"load={save}", "--set", "train_iters=100")
    runs.append(run)
    output = run.output(60)
    assert run.process.returncode == 0, output
    events = read_events(run.directory / "run")
    starts = [(event["step"], event["restart"]) for event in events if event["event"] == "start"]
    assert starts == [(20, 0), (10, 0)]
    assert ends(run)[0]["decision"] == "restart"


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


@pytest.mark.slow
def test_a_run_that_was_asked_to_end_is_over_even_if_a_rank_fails(tmp_path: Path, runs: list[LaunchedRun]) -> None:
    run = start(tmp_path / "asked", "save", "--max-restarts", "3")
    runs.append(run)
    run.wait_up()
    run.process.send_signal(signal.SIGTERM)
    output = run.output(60)
    assert run.process.returncode == 1, output
    assert [(end["kind"], end["decision"]) for end in ends(run)] == [("rank failed", "stop")]
    assert not run.pids()


@pytest.mark.slow
def test_a_signal_after_a_preemption_notice_lets_the_ranks_save(tmp_path: Path, runs: list[LaunchedRun]) -> None:
    notice = ("--set", "preemption_file=notice", "--set", "preemption_seconds=0.2", "--max-restarts", "3")
    run = start(tmp_path / "taken", "wait", *notice, save_seconds=3)
    runs.append(run)
    run.wait_up()
    (run.directory / "notice").touch()
    time.sleep(1.5)
    run.process.send_signal(signal.SIGTERM)
    output = run.output(60)
    assert run.process.returncode == 0, output
    assert len(list((run.directory / "run").glob("starts.saved.*"))) == 2
    assert [(end["kind"], end["decision"]) for end in ends(run)] == [("asked to end", "stop")]
