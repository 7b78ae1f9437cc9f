"""What the launcher is told about an error."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from neox.errors import CheckpointError, ConfigError, NoCheckpointError, NotFiniteError, TrainingError
from neox.launch import Cause
from neox.launch.agent.agent_files import PROGRESS_VARIABLE, RankActivity
from neox.train.failures import failure_report, reported_failures


def full_disk() -> CheckpointError:
    error = CheckpointError("cannot be written")
    error.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    return error


@pytest.mark.parametrize(
    ("error", "cause", "step"),
    [
        (NotFiniteError("loss nan", 12), Cause.NOT_FINITE, 12),
        (ConfigError("wrong"), Cause.REFUSED, None),
        (full_disk(), Cause.DISK_FULL, None),
        (NoCheckpointError("all are damaged"), Cause.NO_CHECKPOINT, None),
    ],
)
def test_a_cause_that_decides_reaches_the_agent(
    error: Exception, cause: str, step: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PROGRESS_VARIABLE, str(tmp_path / "progress"))
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(type(error)), reported_failures():
        raise error
    activity = RankActivity(tmp_path / "progress", tmp_path)
    report = activity.failure(3)
    assert report is not None
    assert (report.cause, report.step, report.ranks) == (cause, step, ())
    assert activity.failure(2) is None
    assert json.loads((tmp_path / "failure.3").read_text())["cause"] == cause


def test_other_errors_say_nothing() -> None:
    assert failure_report(TrainingError("too many")) is None
    assert failure_report(OSError(errno.EIO, "broken")) is None
