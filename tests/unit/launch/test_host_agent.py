"""The agent of one host, without a run around it."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from neox.errors import LaunchError
from neox.launch import host_name
from neox.launch.agent import host_agent
from neox.launch.agent.agent_files import HOST_VARIABLE, RankActivity, Silence
from neox.launch.agent.host_agent import HostAgent, SignalRequests, StartOnHost
from neox.launch.agent.rank_ending import EndState
from neox.launch.agent.rank_group import host_variables
from neox.launch.agent.rank_process import RankProcess
from neox.launch.agent.watchdog import Watchdog
from neox.launch.events import Event
from neox.launch.failures import EXIT_HANG
from neox.launch.orders import Orders
from neox.launch.spec import Host, LaunchSpec


class RecordingWatchdog(Watchdog):
    """A watchdog without a process."""

    def __init__(self) -> None:
        self.removed: list[int] = []

    def add(self, pid: int) -> None:
        """Nothing is killed if this agent dies."""

    def has_ended(self) -> bool:
        return False

    def remove(self, pid: int) -> None:
        self.removed.append(pid)


def test_a_rank_that_ends_while_stacks_are_shown_is_not_watched_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = LaunchSpec("id", (Host("a", (0,)),), "::1", 1, "s.py", (), str(tmp_path), "/", str(tmp_path), sys.executable)
    events: list[Event] = []
    start = StartOnHost(spec, 0, events.append, SignalRequests(stacks=True), Orders())
    watchdog = start.ranks.watchdog = RecordingWatchdog()
    monkeypatch.setattr(host_agent, "_STACK_SECONDS", 0.5)
    rank = RankProcess(0, tmp_path / "log", events.append)
    rank.start(["sleep", "600"], os.environ, str(tmp_path), None)  # SIGUSR1 ends it
    start.ranks.add(rank, {})
    start.follow_ranks()
    assert {"kind": "stacks"} in events
    assert rank.code == -signal.SIGUSR1
    assert watchdog.removed == [rank.pid]


def test_ranks_know_their_host_by_the_name_in_the_hostfile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HOST_VARIABLE, raising=False)
    assert host_name() == socket.gethostname()
    hosts = (Host("10.0.0.1", (0,)), Host("10.0.0.2", (0,)))
    spec = LaunchSpec("id", hosts, "::1", 1, "s.py", (), "/", "/", "/", sys.executable)
    variables = host_variables(spec, 1, hosts[1], {}, Path("progress"))
    monkeypatch.setenv(HOST_VARIABLE, variables[HOST_VARIABLE])
    assert host_name() == "10.0.0.2"


def test_a_wall_clock_that_is_set_is_no_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = LaunchSpec("id", (Host("a", (0,)),), "::1", 1, "s.py", (), str(tmp_path), "/", str(tmp_path), sys.executable)
    events: list[Event] = []
    start = StartOnHost(replace(spec, hang_timeout=60.0), 0, events.append, SignalRequests(), Orders())
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    progress = tmp_path / "progress"
    progress.touch()
    start.silence = Silence(RankActivity(progress, tmp_path))
    wall = time.time
    for shift in (7200, -7200):
        monkeypatch.setattr(time, "time", lambda shift=shift: wall() + shift)
        start.check_progress()
        clock[0] += 50
        os.utime(progress, (wall() + shift, wall() + shift))  # the next step, by the new clock
        start.check_progress()
        assert start.ending.state is EndState.RUNNING
    clock[0] += 61
    start.check_progress()
    assert start.status == EXIT_HANG


def test_stacks_are_shown_between_heartbeats_and_without_a_log_that_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = LaunchSpec("id", (Host("a", (0,)),), "::1", 1, "s.py", (), str(tmp_path), "/", str(tmp_path), sys.executable)
    monkeypatch.setattr(host_agent, "_STACK_SECONDS", 0.5)
    monkeypatch.setattr(host_agent, "_HEARTBEAT_SECONDS", 0.1)
    events: list[Event] = []
    start = StartOnHost(spec, 0, events.append, SignalRequests(stacks=True), Orders())
    rank = RankProcess(0, tmp_path / "log", events.append)
    rank.start(["sh", "-c", "trap '' USR1; sleep 1"], os.environ, str(tmp_path), None)
    (tmp_path / "log").unlink()
    start.ranks.add(rank, {})
    start.follow_ranks()
    kinds = [event["kind"] for event in events]
    assert kinds.count("alive") > kinds[: kinds.index("stacks")].count("alive") > 1
    assert (rank.code, kinds.count("stacks")) == (0, 1)


def test_what_was_asked_between_two_starts_does_not_reach_the_ranks_of_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGUSR1 and an interrupt are for ranks that run; the ranks of the failed start have ended."""
    spec = LaunchSpec("id", (Host("a", (0,)),), "::1", 1, "s.py", (), str(tmp_path), "/", str(tmp_path), sys.executable)
    agent = HostAgent(spec, 0, lifeline=False, plain=False)
    told: list[Event] = []
    monkeypatch.setattr(agent, "tell", told.append)
    orders = iter([None, spec])  # the second look finds the next start
    monkeypatch.setattr(agent.orders, "next_start", lambda seconds: next(orders))
    agent.requests.stacks = agent.requests.interrupt = True
    assert agent._wait_for_next_start() is spec
    assert told == [{"kind": "waiting"}]
    assert agent.requests == SignalRequests()
    agent.requests.stop = signal.SIGTERM
    assert agent._wait_for_next_start() is None, "a stop ends the agent"


def test_a_host_whose_torch_cannot_use_its_devices_starts_no_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = LaunchSpec("id", (Host("a", (0,)),), "::1", 1, "s.py", (), str(tmp_path), "/", str(tmp_path), sys.executable)
    monkeypatch.setattr(host_agent, "torch_problem", lambda environment: "8 Ascend devices, but torch_npu is missing")
    start = StartOnHost(spec, 0, lambda event: None, SignalRequests(), Orders())
    with pytest.raises(LaunchError, match="a has 8 Ascend devices"):
        start.run({}, None)
    assert not start.ranks.ranks
    assert not start.directory.exists()
