"""State of interrupted runs, files cut to a size, and the lock of an output."""

from __future__ import annotations

import fcntl
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from neox.errors import DataError
from neox.resume import ResumeLog, is_output_locked, lock_output, open_truncated
from tests.errors import raises_naming


@dataclass
class State:
    line: int = 0
    sizes: tuple[int, int] = (0, 0)

    @staticmethod
    def from_json(fields: dict[str, Any]) -> State:
        return State(fields["line"], tuple(fields["sizes"]))


def test_a_state_is_read_by_its_own_run_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = ResumeLog(tmp_path / "run" / "progress.json", "run 1", State.from_json)
    assert log.read() is None
    assert log.is_due
    log.write(State(3, (10, 20)))
    assert not log.is_due
    assert ResumeLog(log.path, "run 1", State.from_json).read() == State(3, (10, 20))
    assert caplog.text == ""
    assert ResumeLog(log.path, "run 2", State.from_json).read() is None
    log.remove()
    assert not log.path.exists()


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"run": "run 1", "line": 1}', "null"])
def test_a_damaged_state_starts_over_with_a_warning(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "progress.json").write_text(content)
    assert ResumeLog(tmp_path / "progress.json", "run 1", State.from_json).read() is None
    assert "progress.json" in caplog.text


def test_a_file_is_continued_after_the_bytes_that_count(tmp_path: Path) -> None:
    path = tmp_path / "data.partial"
    with open_truncated(path, 0) as file:
        file.write(b"counted, not counted")
    with open_truncated(path, 7) as file:
        file.write(b"!")
    assert path.read_bytes() == b"counted!"
    with raises_naming(DataError, path, "8 bytes"):
        open_truncated(path, 9)


def test_two_runs_cannot_write_one_output(tmp_path: Path) -> None:
    output = str(tmp_path / "out")
    with lock_output(output), raises_naming(DataError, output), lock_output(output):
        pass
    with lock_output(output):
        assert (tmp_path / "out.lock").exists()
    assert not (tmp_path / "out.lock").exists()


def test_a_look_at_the_lock_does_not_keep_a_run_from_starting(tmp_path: Path) -> None:
    output = str(tmp_path / "out")
    with open(f"{output}.lock", "w") as looking:
        fcntl.flock(looking, fcntl.LOCK_EX)
        release = threading.Timer(0.02, fcntl.flock, (looking, fcntl.LOCK_UN))
        release.start()
        with lock_output(output):
            assert is_output_locked(output)
        release.join()
    assert not is_output_locked(output)
