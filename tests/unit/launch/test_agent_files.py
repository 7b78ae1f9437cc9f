"""Progress of ranks and their answers to a signal, as their agent sees them."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from neox.launch import acknowledge_stop, busy_saving
from neox.launch.agent.agent_files import ANSWER_SECONDS, PROGRESS_VARIABLE, RankActivity, agent_pid
from neox.launch.processes import process_start


def test_a_long_step_has_time_to_answer_and_a_stuck_one_has_not(tmp_path: Path) -> None:
    activity = RankActivity(tmp_path / "progress", tmp_path)
    assert activity.answer_seconds() == ANSWER_SECONDS
    now = time.time()
    for ago in (100, 70, 65):
        activity.file.touch()
        os.utime(activity.file, (now - ago, now - ago))
        activity.update()
    assert activity.answer_seconds() == ANSWER_SECONDS  # the next report is more than twice as late as any was
    os.utime(activity.file, (now - 20, now - 20))
    activity.update()  # 45 s after the last one
    assert activity.answer_seconds() == pytest.approx(70, abs=1)


def test_a_rank_that_saves_need_not_answer_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    activity = RankActivity(tmp_path / "progress", tmp_path)
    with busy_saving():  # outside a run nobody asks
        pass
    monkeypatch.setenv(PROGRESS_VARIABLE, str(activity.file))
    monkeypatch.setenv("RANK", "3")
    with busy_saving():
        assert activity.has_answered(3)
        assert not activity.has_answered(2)
    assert not activity.has_answered(3)
    with busy_saving():
        acknowledge_stop()
    assert activity.has_answered(3)


def test_an_agent_is_not_mistaken_for_a_later_process_with_its_number(tmp_path: Path) -> None:
    assert agent_pid(tmp_path / "removed by the agent") is None
    start = process_start(os.getpid())
    (tmp_path / "pid").write_text(f"{os.getpid()} {start}")
    assert agent_pid(tmp_path) == os.getpid()
    (tmp_path / "pid").write_text(f"{os.getpid()} {int(start) - 1}")
    assert agent_pid(tmp_path) is None
    (tmp_path / "pid").write_text(f"{2**22 + 1} {start}")
    assert agent_pid(tmp_path) is None
