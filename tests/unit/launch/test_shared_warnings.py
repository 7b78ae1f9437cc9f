"""What several ranks say is shown once."""

from __future__ import annotations

import pytest

from neox.launch.events import text_events
from neox.launch.supervisor import shared_warnings
from neox.launch.supervisor.shared_warnings import SharedWarnings


class Screen:
    """What a user sees."""

    def __init__(self, *shown: str) -> None:
        self.lines: list[str] = []
        self.warnings = SharedWarnings(self.lines.append, shown)

    def write(self, rank: int, text: str) -> None:
        """Let a rank write a line to stderr."""
        for event in text_events({"kind": "line", "rank": rank, "stream": "err"}, text):
            if self.warnings.take(event):
                self.lines.append(event["text"])


def log_line(rank: int, message: str) -> str:
    mark = f"[rank {rank}] " if rank else ""
    return f"{mark}10:15:0{rank} WARNING neox.data: {message}"


def test_a_warning_of_all_ranks_comes_from_rank_0_whoever_is_first() -> None:
    screen = Screen()
    for rank in (1, 0, 2):
        screen.write(rank, log_line(rank, "a"))
    screen.warnings.show_all()
    assert screen.lines == [log_line(0, "a")]


def test_a_warning_of_other_ranks_is_shown_once_with_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    for rank in (2, 3, 5):
        screen.write(rank, log_line(rank, "a"))
    screen.write(5, log_line(5, "b"))
    screen.warnings.show_due()
    assert screen.lines == []
    monkeypatch.setattr(shared_warnings, "_WAIT_SECONDS", 0.0)
    screen.warnings.show_due()
    assert screen.lines == ["[ranks 2-3, 5] 10:15:02 WARNING neox.data: a", log_line(5, "b")]
    screen.write(6, log_line(6, "a"))
    monkeypatch.setattr(shared_warnings, "_SAME_SECONDS", 0.0)
    screen.write(7, log_line(7, "a"))
    screen.warnings.show_all()
    assert screen.lines[2:] == [log_line(7, "a")]  # later, and so another one


def test_other_lines_are_shown_at_once() -> None:
    screen = Screen()
    lines = [(-1, "host: a lock"), (0, "words"), (0, "words"), (3, "[rank 3] words"), (2, "[rank 2] " + 4000 * "x")]
    for rank, text in lines:
        screen.write(rank, text)
    assert screen.lines == [text for _, text in lines]


def test_rank_0_does_not_repeat_the_launcher() -> None:
    screen = Screen("WARNING neox.data: a")
    screen.write(0, log_line(0, "a"))
    screen.write(1, log_line(1, "a"))
    screen.write(0, log_line(0, "b"))
    screen.warnings.show_all()
    assert screen.lines == [log_line(0, "b")]
