"""Notices that a host is about to be taken."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from neox.launch.agent import preemption
from neox.launch.agent.preemption import PreemptionSource, PreemptionWatch, ProbedNotice
from neox.launch.processes import is_alive


def watch(command: str | None = None, file: str | None = None, groups: list[int] | None = None) -> PreemptionWatch:
    groups = [] if groups is None else groups
    return PreemptionWatch(PreemptionSource(command, file, 0.02), dict(os.environ), (groups.append, groups.remove))


def test_a_command_that_succeeds_and_a_file_that_appears_are_notices(tmp_path: Path) -> None:
    file = tmp_path / "taken"
    assert watch("exit 22").look() is None
    assert watch("no_such_program_at_all").look() is None
    assert watch('test -n "$PATH"').look() is not None
    assert watch(file=str(file)).look() is None
    file.touch()
    assert str(file) in (watch("false", str(file)).look() or "")


def test_a_command_that_hangs_is_no_notice_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(preemption, "_COMMAND_SECONDS", 2)  # a busy machine starts the shell late
    groups: list[int] = []
    pid_file = tmp_path / "pid"
    assert watch(f"sleep 60 & echo $! > {pid_file}; wait", groups=groups).look() is None
    assert groups == []
    deadline = time.monotonic() + 30  # a killed process may end late on a busy machine
    while is_alive(int(pid_file.read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_one_look_uses_the_variables_of_the_run(tmp_path: Path) -> None:
    assert ProbedNotice('test -n "$OF_THE_RUN"', None, {"OF_THE_RUN": "x"}, 4.0).look() is not None
    assert ProbedNotice('test -n "$OF_THE_RUN"', None, {}, 4.0).look() is None
    assert ProbedNotice(None, str(tmp_path), {}, 4.0).look() is not None


def test_the_watch_looks_until_there_is_a_notice(tmp_path: Path) -> None:
    file = tmp_path / "taken"
    looking = watch(file=str(file))
    looking.start()
    time.sleep(0.1)
    assert looking.notice is None
    file.touch()
    deadline = time.monotonic() + 10
    while looking.notice is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    looking.stop()
