"""What an agent sees of its ranks: when they got on, and who answered a signal."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from neox.launch import acknowledge_stop, busy_saving
from neox.launch.progress import ANSWER_SECONDS, RankActivity
from neox.launch.rendezvous import PROGRESS_VARIABLE


def test_a_long_step_has_time_to_answer_and_a_stuck_one_has_not(tmp_path: Path) -> None:
    progress = RankActivity(tmp_path / "progress", tmp_path)
    assert progress.patience() == ANSWER_SECONDS
    now = time.time()
    for ago in (100, 70, 65):
        progress.file.touch()
        os.utime(progress.file, (now - ago, now - ago))
        progress.look()
    assert progress.patience() == ANSWER_SECONDS  # the next report is more than twice as late as any was
    os.utime(progress.file, (now - 20, now - 20))
    progress.look()  # 45 s after the last one
    assert progress.patience() == pytest.approx(70, abs=1)
    assert progress.last() >= now - 1  # ranks have only just started


def test_a_rank_that_saves_need_not_answer_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    progress = RankActivity(tmp_path / "progress", tmp_path)
    with busy_saving():  # outside a run nobody asks
        pass
    monkeypatch.setenv(PROGRESS_VARIABLE, str(progress.file))
    monkeypatch.setenv("RANK", "3")
    with busy_saving():
        assert progress.answered(3)
        assert not progress.answered(2)
    assert not progress.answered(3)
    with busy_saving():
        acknowledge_stop()
    assert progress.answered(3)
