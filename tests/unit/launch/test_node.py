"""The agent of one host, without a run around it."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from neox.launch import node
from neox.launch.events import Event
from neox.launch.rank_process import RankProcess, Watchdog
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
    agent = node.NodeAgent(spec, 0)
    watchdog = agent.watchdog = RecordingWatchdog()
    events: list[Event] = []
    monkeypatch.setattr(agent, "tell", events.append)
    monkeypatch.setattr(node, "_STACK_SECONDS", 0.5)
    rank = RankProcess(0, tmp_path / "log", events.append)
    rank.start(["sleep", "600"], os.environ, str(tmp_path), None)  # SIGUSR1 ends it
    agent.ranks.append(rank)
    agent._show_stacks()
    assert rank.code == -signal.SIGUSR1
    assert watchdog.removed == [rank.pid]
