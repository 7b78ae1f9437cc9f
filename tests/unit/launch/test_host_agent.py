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

from neox.launch import host_name
from neox.launch.agent import host_agent
from neox.launch.agent.agent_files import HOST_VARIABLE, RankActivity
from neox.launch.agent.rank_process import RankProcess, Watchdog
from neox.launch.events import Event
from neox.launch.failures import EXIT_HANG
from neox.launch.spec import Host, LaunchSpec


class RecordingWatchdog(Watchdog):
    """A watchdog without a process."""

    def __init__(self) -> None:
        self.removed: list[int] = []

    def remove(self, pid: int) -> None:
        self.removed.append(pid)


def test_a_rank_that_ends_while_stacks_are_shown_is_not_watched_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = LaunchSpec("id", (Host("a", (0,)),), "::1", 1, "s.py", (), str(tmp_path), "/", str(tmp_path), sys.executable)
    agent = host_agent.NodeAgent(spec, 0)
    watchdog = agent.watchdog = RecordingWatchdog()
    events: list[Event] = []
    monkeypatch.setattr(agent, "tell", events.append)
    monkeypatch.setattr(host_agent, "_STACK_SECONDS", 0.5)
    rank = RankProcess(0, tmp_path / "log", events.append)
    rank.start(["sleep", "600"], os.environ, str(tmp_path), None)  # SIGUSR1 ends it
    agent.ranks.append(rank)
    agent._show_stacks()
    assert rank.code == -signal.SIGUSR1
    assert watchdog.removed == [rank.pid]


def test_ranks_know_their_host_by_the_name_in_the_hostfile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HOST_VARIABLE, raising=False)
    assert host_name() == socket.gethostname()
    hosts = (Host("10.0.0.1", (0,)), Host("10.0.0.2", (0,)))
    spec = LaunchSpec("id", hosts, "::1", 1, "s.py", (), "/", "/", "/", sys.executable)
    variables = host_agent.NodeAgent(spec, 1, secrets={}).environment()
    monkeypatch.setenv(HOST_VARIABLE, variables[HOST_VARIABLE])
    assert host_name() == "10.0.0.2"


def test_a_wall_clock_that_is_set_is_no_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = LaunchSpec("id", (Host("a", (0,)),), "::1", 1, "s.py", (), str(tmp_path), "/", str(tmp_path), sys.executable)
    agent = host_agent.NodeAgent(replace(spec, hang_timeout=60.0), 0)
    monkeypatch.setattr(agent, "tell", lambda event: None)
    monkeypatch.setattr(host_agent, "_STACK_SECONDS", 0.0)
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    progress = tmp_path / "progress"
    progress.touch()
    agent.activity = RankActivity(progress, tmp_path)
    agent.silence = host_agent.Silence(agent.activity)
    wall = time.time
    for shift in (7200, -7200):
        monkeypatch.setattr(time, "time", lambda shift=shift: wall() + shift)
        agent._check_progress()
        clock[0] += 50
        os.utime(progress, (wall() + shift, wall() + shift))  # the next step, by the new clock
        agent._check_progress()
        assert agent.code == 0
    clock[0] += 61
    agent._check_progress()
    assert agent.code == EXIT_HANG
