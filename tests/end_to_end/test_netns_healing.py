"""Hosts cut off in a training: a spare one steps in; without one the run shrinks, and grows when the host is back."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from neox.run_events import read_events
from tests.end_to_end.launched_runs import ROOT, LaunchedRun
from tests.end_to_end.network_namespaces import TwoMachines, two_machines, why_not

_REASON = why_not()
pytestmark = [pytest.mark.netns, pytest.mark.slow, pytest.mark.skipif(_REASON is not None, reason=_REASON or "")]

DATA = ROOT / "tests" / "golden" / "data" / "small_text_document"
ITERATIONS = 400


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoMachines]:
    with two_machines(tmp_path_factory.mktemp("machines")) as both:
        yield both


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> LaunchedRun:
    """The same training on this machine, without a failure."""
    run = train(tmp_path_factory.mktemp("undisturbed"), ranks=2)
    output = run.output(900)
    assert run.process.returncode == 0, output
    return run


def train(
    directory: Path, arguments: Sequence[str] = (), *, ranks: int | None = None, prefix: Sequence[str] = (), **env: str
) -> LaunchedRun:
    keys = {
        "data_path": DATA,
        "save": directory / "save",
        "checkpoint_factor": 20,
        "keep_last_n_checkpoints": 3,
        "train_iters": ITERATIONS,
        "lr_decay_iters": ITERATIONS,
        "eval_interval": 10 * ITERATIONS,
        "eval_iters": 1,
        "doctor_timeout": 30,
    }
    words = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
    return LaunchedRun(directory, [*words, *arguments], ranks, None, prefix, **env)


def train_on(machines: TwoMachines, directory: Path, hostfile: str, *settings: str) -> LaunchedRun:
    for host in machines.hosts:
        machines.wait_for(host)
    (directory / "hostfile").write_text(hostfile)
    words = ["-H", str(directory / "hostfile"), "--max-restarts", "5"]
    words += [word for setting in settings for word in ("--set", setting)]
    return train(directory, words, prefix=machines.inside([]), **machines.environment)


def losses(run: LaunchedRun) -> list[float]:
    """The loss of every iteration; of one that was repeated, the last."""
    found: dict[int, float] = {}
    path = run.directory / "run" / "metrics.jsonl"
    if not path.exists():
        return []
    for line in path.read_text().splitlines():
        if line.endswith("}") and '"train/lm_loss"' in line:
            row = json.loads(line)
            found[row["iteration"]] = row["train/lm_loss"]
    return [loss for _, loss in sorted(found.items())]


def events(run: LaunchedRun, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(run.directory / "run") if event["event"] == kind]


def wait(run: LaunchedRun, condition: Callable[[], bool], seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert run.process.poll() is None, run.output()
        assert time.monotonic() < deadline, read_events(run.directory / "run")
        time.sleep(0.05)


def cable(machines: TwoMachines, state: str) -> None:
    """Plug the second machine's cable in (`up`) or out (`down`)."""
    subprocess.run(["ip", "-n", machines.names[1], "link", "set", "eth0", state], check=True)


def check_end(run: LaunchedRun, undisturbed: LaunchedRun) -> None:
    output = run.output(900)
    assert run.process.returncode == 0, output
    expected = losses(undisturbed)
    assert len(expected) == ITERATIONS
    assert losses(run) == pytest.approx(expected, abs=2e-6)


def test_a_spare_host_replaces_one_that_is_cut_off(
    machines: TwoMachines, undisturbed: LaunchedRun, tmp_path: Path
) -> None:
    first, second = machines.hosts
    third = machines.add_third_machine()
    run = train_on(machines, tmp_path, f"{first} slots=1\n{second} slots=1\n{third} slots=2 spare\n")
    try:
        wait(run, lambda: len(losses(run)) > 30)
        cable(machines, "down")
        wait(run, lambda: len(events(run, "start")) == 2)
        assert [start["hosts"] for start in events(run, "start")] == [[first, second], [first, third]]
        assert [event["host"] for event in events(run, "host left out")] == [second]
        assert events(run, "end")[0]["host"] == second
        check_end(run, undisturbed)
    finally:
        cable(machines, "up")
        run.end()


def test_a_run_shrinks_without_a_spare_host_and_grows_again(
    machines: TwoMachines, undisturbed: LaunchedRun, tmp_path: Path
) -> None:
    first, second = machines.hosts
    run = train_on(machines, tmp_path, f"{first} slots=1\n{second} slots=1\n", "elastic=true")
    try:
        wait(run, lambda: len(losses(run)) > 30)
        cable(machines, "down")
        wait(run, lambda: len(events(run, "start")) == 2)
        done = len(losses(run))
        wait(run, lambda: len(losses(run)) > done + 30)
        cable(machines, "up")
        time.sleep(1)
        os.kill(run.rank_pid(0), signal.SIGKILL)
        wait(run, lambda: len(events(run, "start")) == 3)
        assert [start["ranks"] for start in events(run, "start")] == [2, 1, 2]
        assert [(event["before"], event["ranks"]) for event in events(run, "ranks changed")] == [(2, 1), (1, 2)]
        check_end(run, undisturbed)
    finally:
        cable(machines, "up")
        run.end()


def test_a_run_waits_for_a_host_that_nothing_can_replace(
    machines: TwoMachines, undisturbed: LaunchedRun, tmp_path: Path
) -> None:
    first, second = machines.hosts
    run = train_on(machines, tmp_path, f"{first} slots=1\n{second} slots=1\n", "doctor_timeout=5")
    try:
        wait(run, lambda: len(losses(run)) > 30)
        cable(machines, "down")
        wait(run, lambda: len(events(run, "end")) == 3)
        cable(machines, "up")
        check_end(run, undisturbed)
        ends = [(event["kind"], event["host"], event["decision"]) for event in events(run, "end")[:3]]
        assert ends[0] == ("host lost", second, "restart")
        assert ends[1] == ("not started", second, "restart after 1 s")
        assert ends[2] == ("not started", second, "restart after 2 s")
        assert len(events(run, "start")) == 2
    finally:
        cable(machines, "up")
        run.end()


def test_cuts_at_random_moments(machines: TwoMachines, undisturbed: LaunchedRun, tmp_path: Path) -> None:
    """A cut of some seconds changes nothing; after longer ones the run shrinks, and grows when a rank is killed."""
    generator = random.Random(1)
    first, second = machines.hosts
    run = train_on(machines, tmp_path, f"{first} slots=1\n{second} slots=1\n", "elastic=true")

    def steps_later(least: int, most: int) -> None:
        goal = len(losses(run)) + generator.randint(least, most)
        wait(run, lambda: len(losses(run)) >= goal)

    try:
        steps_later(5, 60)
        cable(machines, "down")
        time.sleep(generator.uniform(1, 6))
        cable(machines, "up")
        steps_later(1, 20)
        assert len(events(run, "start")) == 1
        for _ in range(2):
            starts = len(events(run, "start"))
            steps_later(1, 60)
            cable(machines, "down")
            wait(run, lambda n=starts: len(events(run, "start")) == n + 1)  # type: ignore[misc]
            steps_later(1, 10)
            cable(machines, "up")
            time.sleep(1)
            os.kill(run.rank_pid(0), signal.SIGKILL)
            wait(run, lambda n=starts: len(events(run, "start")) == n + 2)  # type: ignore[misc]
        assert [start["ranks"] for start in events(run, "start")] == [2, 1, 2, 1, 2]
        check_end(run, undisturbed)
    finally:
        cable(machines, "up")
        run.end()
