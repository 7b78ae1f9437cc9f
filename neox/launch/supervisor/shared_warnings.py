"""Warnings of ranks as a user should see them: what several ranks say is shown once.

[rank 1] 10:15:00 WARNING neox.data: ...        is dropped if rank 0 says the same within a second
[rank 2] 10:15:00 WARNING neox.engine: ...      and the same from rank 3: shown once, for `[ranks 2-3]`
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from neox.launch.events import Event
from neox.launch.supervisor.outcome import rank_list

_WAIT_SECONDS = 1.0  # for the same warning of other ranks
_SAME_SECONDS = 60.0  # in which the same words are the same warning
_LOG_LINE = re.compile(r"(?:\[rank \d+\] )?(?P<time>\d\d:\d\d:\d\d) (?P<message>[A-Z]+ neox\S*: .*)")


@dataclass
class _Waiting:
    """A warning that waits for the same one of other ranks."""

    since: float
    time: str
    ranks: list[int]


class SharedWarnings:
    """Stderr lines of ranks on their way to the user.

    Lines of rank 0 are shown at once, as they are. Log lines of other ranks wait a second.

    Args:
        show: Function that shows a line of text.
        shown: Log lines that the user has seen already, without their time.
    """

    def __init__(self, show: Callable[[str], None], shown: Iterable[str] = ()) -> None:
        self._show = show
        self._shown_by_launcher = frozenset(shown)
        self._said_at: dict[str, float] = {}  # messages that were shown or dropped, and when
        self._waiting: dict[str, _Waiting] = {}
        self._open_lines: dict[int, str] = {}  # what is there of lines without an end, by rank

    def take(self, event: Event) -> bool:
        """Take a `line` event of stderr, and return whether the caller is to show it now."""
        rank = event["rank"]
        is_shown_at_once = rank <= 0  # rank 0, or an agent, whose rank is -1
        begin = self._open_lines.pop(rank, "")
        line = begin + event["text"]
        if event["more"]:
            self._open_lines[rank] = line
            return is_shown_at_once
        match = _LOG_LINE.fullmatch(line)
        if match is None:
            if not is_shown_at_once:
                self._show(line)
            return is_shown_at_once
        if is_shown_at_once:
            is_new = self._take_first_rank(match["message"])
            return is_new or bool(begin)  # what has begun is shown to its end
        self._take_other_rank(rank, match["message"], match["time"])
        return False

    def show_due(self) -> None:
        """Show the warnings that have waited long enough."""
        now = time.monotonic()
        due = [message for message, waiting in self._waiting.items() if now - waiting.since >= _WAIT_SECONDS]
        for message in due:
            self._show_waiting(message)

    def show_all(self) -> None:
        """Show the warnings that are still waiting, because no other rank will say anything."""
        for message in list(self._waiting):
            self._show_waiting(message)

    def _take_first_rank(self, message: str) -> bool:
        """Note what rank 0 says, and return whether it is new to the user."""
        self._waiting.pop(message, None)
        self._said_at[message] = time.monotonic()
        return message not in self._shown_by_launcher

    def _take_other_rank(self, rank: int, message: str, clock: str) -> None:
        now = time.monotonic()
        said_at = self._said_at.get(message)
        if said_at is not None and now - said_at < _SAME_SECONDS:
            return
        waiting = self._waiting.setdefault(message, _Waiting(now, clock, []))
        waiting.ranks.append(rank)

    def _show_waiting(self, message: str) -> None:
        waiting = self._waiting.pop(message)
        self._said_at[message] = time.monotonic()
        ranks = sorted(set(waiting.ranks))
        self._show(f"[{rank_list(ranks)}] {waiting.time} {message}")
