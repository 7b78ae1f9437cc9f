"""The event log of a run, whose lines may be cut off."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from neox.run_events import EVENTS_FILE, append_event, read_events


def names(directory: Path) -> list[str]:
    return [event["event"] for event in read_events(directory)]


def test_an_event_after_an_incomplete_line_is_not_lost(tmp_path: Path) -> None:
    append_event(tmp_path, "start", step=3)
    path = tmp_path / EVENTS_FILE
    path.write_text(path.read_text() + '{"time": 1.0, "event": "en')
    append_event(tmp_path, "start", step=5)
    append_event(tmp_path, "end")
    assert names(tmp_path) == ["start", "start", "end"]
    assert path.read_text().count("\n") == 4


def test_an_event_is_written_whole_though_the_kernel_takes_a_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write

    def write_few(descriptor: int, data: bytes) -> int:
        return write(descriptor, data[:5])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write_few)
        append_event(tmp_path, "start", hosts=["a", "b"])
    append_event(tmp_path, "end")
    assert names(tmp_path) == ["start", "end"]
