"""What an agent sees of its ranks: when they got on, and who answered a signal."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from neox.launch.progress import ANSWER_SECONDS, Progress


def test_a_long_step_has_time_to_answer_and_a_stuck_one_has_not(tmp_path: Path) -> None:
    progress = Progress(tmp_path / "progress", tmp_path)
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
