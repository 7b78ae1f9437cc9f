"""Restarts over ssh with agents that stay on their hosts, and with warm processes there and on spare hosts."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from neox.launch.agent.warm_start import RANK_NAME, WAITING_NAME
from neox.run_events import read_events
from tests.end_to_end.launched_runs import ROOT, LaunchedRun, command_line
from tests.end_to_end.network_namespaces import TwoMachines, two_machines, why_not

_REASON = why_not()
pytestmark = [pytest.mark.netns, pytest.mark.slow, pytest.mark.skipif(_REASON is not None, reason=_REASON or "")]

DATA = ROOT / "tests" / "golden" / "data" / "small_text_document"
STEPS = 100_000


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[TwoMachines]:
    (tmp_path / "machines").mkdir()
    with two_machines(tmp_path / "machines") as both:
        yield both


def launch(machines: TwoMachines, directory: Path, hosts: Sequence[str], *settings: str) -> LaunchedRun:
    """A training that is started again, launched on the first machine."""
    hostfile = directory / "hostfile"
    hostfile.write_text("".join(f"{host}\n" for host in hosts))
    keys = {"data_path": DATA, "save": directory / "save", "checkpoint_factor": 20, "keep_last_n_checkpoints": 2}
    keys |= {"train_iters": STEPS, "lr_decay_iters": STEPS, "eval_interval": STEPS, "eval_iters": 1}
    keys |= {"doctor_timeout": 30, "max_restarts": 9, "train_batch_size": 8}
    words = [*(f"{key}={value}" for key, value in keys.items()), *settings]
    arguments = ["-H", str(hostfile), *(word for setting in words for word in ("--set", setting))]
    environment = {**machines.environment, "WANDB_API_KEY": "sesame"}
    return LaunchedRun(directory, arguments, None, None, machines.inside([]), **environment)


def wait(run: LaunchedRun, condition: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert run.process.poll() is None, run.output()
        assert time.monotonic() < deadline, [(pid, comm(pid), command_line(pid)) for pid in run.pids()]
        time.sleep(0.05)


def comm(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def namespace_pids(machines: TwoMachines, number: int) -> set[int]:
    listed = subprocess.run(["ip", "netns", "pids", machines.names[number]], capture_output=True, text=True, check=True)
    return set(map(int, listed.stdout.split()))


def count(run: LaunchedRun, name: str) -> int:
    return [comm(pid) for pid in run.pids()].count(name)


def starts(run: LaunchedRun) -> int:
    return sum(event["event"] == "start" for event in read_events(run.directory / "run"))


def steps(run: LaunchedRun) -> int:
    """How many steps were trained, repeated ones too."""
    path = run.directory / "run" / "metrics.jsonl"
    return path.read_bytes().count(b"train/lm_loss") if path.exists() else 0


def wait_for_steps(run: LaunchedRun, start: int, warm: int) -> None:
    """Wait until ranks train after a start, and processes are warm for the next one."""
    wait(run, lambda: starts(run) >= start)
    assert starts(run) == start
    before = steps(run)
    wait(run, lambda: steps(run) > before + 25)
    wait(run, lambda: count(run, WAITING_NAME) == warm)


def agents_of(run: LaunchedRun) -> set[int]:
    """The agents, as parents of their ranks and warm processes."""
    stats = [Path(f"/proc/{pid}/stat").read_text() for pid in run.pids("rank")]
    return {int(stat.rpartition(")")[2].split()[1]) for stat in stats}


def wait_until_gone(machines: TwoMachines, seconds: float = 15) -> None:
    deadline = time.monotonic() + seconds
    while left := machines.pids():
        assert time.monotonic() < deadline, [command_line(pid) for pid in left]
        time.sleep(0.05)


def kill_rank(run: LaunchedRun, machines: TwoMachines, number: int) -> None:
    """Kill a rank on one of the machines."""
    inside = namespace_pids(machines, number)
    ranks = [pid for pid in run.pids("rank") if pid in inside and comm(pid) not in (WAITING_NAME, "neox-import")]
    os.kill(ranks[0], signal.SIGKILL)


def cut(machines: TwoMachines) -> None:
    """Take the second machine's power: all its processes end, and its network is gone."""
    daemons = {daemon.pid for daemon in machines.daemons}
    for pid in namespace_pids(machines, 1) - daemons:
        os.kill(pid, signal.SIGKILL)
    subprocess.run(["ip", "-n", machines.names[1], "link", "set", "eth0", "down"], check=True)


def test_agents_stay_on_both_hosts_when_a_rank_dies(machines: TwoMachines, tmp_path: Path) -> None:
    first, second = machines.hosts
    run = launch(machines, tmp_path, [f"{first} slots=1", f"{second} slots=1"])
    try:
        wait_for_steps(run, 1, warm=2)
        agents = agents_of(run)
        assert len(agents) == 2
        for start, number in ((2, 1), (3, 0)):
            kill_rank(run, machines, number)
            wait_for_steps(run, start, warm=2)
            assert count(run, RANK_NAME) == 2
            assert agents_of(run) == agents
        for pid in run.pids("rank"):
            assert b"WANDB_API_KEY=sesame" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        run.process.send_signal(signal.SIGTERM)
        output = run.output(60)
        assert run.process.returncode == 0, output
        wait_until_gone(machines)
    finally:
        run.end()


def test_a_spare_host_steps_in_warm_and_agents_end_with_the_launcher(machines: TwoMachines, tmp_path: Path) -> None:
    first, second = machines.hosts
    third = machines.add_third_machine()
    run = launch(machines, tmp_path, [f"{first} slots=1", f"{second} slots=1", f"{third} slots=2 spare"])
    try:
        wait_for_steps(run, 1, warm=3)
        cut(machines)
        wait_for_steps(run, 2, warm=2)
        assert count(run, RANK_NAME) == 2
        ends = [event for event in read_events(run.directory / "run") if event["event"] == "end"]
        assert [end["host"] for end in ends] == [second]
        os.kill(run.process.pid, signal.SIGKILL)
        run.process.wait(10)
        wait_until_gone(machines)
    finally:
        run.end()


def test_a_run_that_shrinks_goes_on_warm_and_grows(machines: TwoMachines, tmp_path: Path) -> None:
    first, second = machines.hosts
    run = launch(machines, tmp_path, [f"{first} slots=1", f"{second} slots=1"], "elastic=true")
    try:
        wait_for_steps(run, 1, warm=2)
        cut(machines)
        wait_for_steps(run, 2, warm=1)
        assert count(run, RANK_NAME) == 1
        subprocess.run(["ip", "-n", machines.names[1], "link", "set", "eth0", "up"], check=True)
        time.sleep(1)
        kill_rank(run, machines, 0)
        wait_for_steps(run, 3, warm=2)
        assert count(run, RANK_NAME) == 1  # the agent of the other host is new
        events = read_events(run.directory / "run")
        assert [event["ranks"] for event in events if event["event"] == "start"] == [2, 1, 2]
        run.process.send_signal(signal.SIGINT)
        run.output(60)
        wait_until_gone(machines)
    finally:
        run.end()


@pytest.mark.parametrize("victim", ["agent", "ssh"])
def test_an_agent_or_a_connection_that_ends_is_replaced(machines: TwoMachines, tmp_path: Path, victim: str) -> None:
    first, second = machines.hosts
    run = launch(machines, tmp_path, [f"{first} slots=1", f"{second} slots=1"])
    try:
        wait_for_steps(run, 1, warm=2)
        agents = agents_of(run)
        if victim == "agent":
            os.kill(next(iter(agents & namespace_pids(machines, 1))), signal.SIGKILL)
        else:
            connections = [pid for pid in run.pids() if command_line(pid).startswith("ssh ")]
            os.kill(connections[-1], signal.SIGKILL)
        wait_for_steps(run, 2, warm=2)
        assert len(agents & agents_of(run)) == 1
        run.process.send_signal(signal.SIGTERM)
        run.output(60)
        wait_until_gone(machines)
    finally:
        run.end()
