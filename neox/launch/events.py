"""What ranks, node agents and the head process tell one another: one JSON object a line.

The same lines travel over a socket from a rank's keeper to the node's agent, and over the agent's standard output
(a pipe, or ssh under pdsh) to the head process. Anything else on that output is text for people.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

_MARK = "@neox "
_LONGEST_TEXT = 1500  # characters; pdsh cuts lines that do not fit its buffer

Event = dict[str, Any]


def encode_event(event: Event) -> str:
    """Write an event as one marked line, without the line end."""
    return _MARK + json.dumps(event, separators=(",", ":"))


def decode_event(line: str) -> Event | None:
    """Read a marked line; None for any other text."""
    if not line.startswith(_MARK):
        return None
    try:
        event = json.loads(line[len(_MARK) :])
    except json.JSONDecodeError:
        return None
    return event if isinstance(event, dict) and "kind" in event else None


def text_events(event: Event, text: str) -> Iterator[Event]:
    """Split a long text over several events; `more` says that the line goes on."""
    pieces = [text[i : i + _LONGEST_TEXT] for i in range(0, len(text), _LONGEST_TEXT)] or [""]
    for number, piece in enumerate(pieces):
        yield {**event, "text": piece, "more": number + 1 < len(pieces)}


class LineBuffer:
    """Cuts a stream of bytes into lines of text."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """Add bytes; return the lines that are complete now, without their ends."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line.decode("utf-8", errors="replace").rstrip("\r") for line in lines]

    def pending(self) -> str:
        """The start of a line that has not ended yet (a prompt, for example); "" while it is not whole characters."""
        for cut in range(min(4, len(self._rest))):
            try:
                return self._rest[: len(self._rest) - cut].decode()
            except UnicodeDecodeError:
                continue
        return ""

    def flush(self) -> list[str]:
        """Return what is left as a last line."""
        rest, self._rest = self._rest, b""
        return [rest.decode("utf-8", errors="replace")] if rest else []
