"""Events that a host's agent sends to the launcher, one JSON object per line.

They are written to the agent's standard output: a pipe, or ssh under pdsh. Any other line there is text for people.

    kind        fields                                            meaning
    ---------   -----------------------------------------------   --------------------------------------------------
    node        host, pid                                         the agent has started
    start       rank, pid                                         a rank has started
    alive       step                                              once a second; `step` is null before the first one
    line        rank (-1: the agent), stream, text, more          a line for people; `more` if it continues
    tail        rank, text, more                                  last lines of a rank that has failed, before `exit`
    exit        rank, code, out_of_memory, killed, step, report   a rank has ended; `report` is its `FailureReport`
    hang        seconds, step, stopped                            no rank made progress; `stopped`: one by a signal
    stacks                                                        all stacks of this host's ranks have been sent
    preempted   notice                                            the host is about to be preempted
    done        code                                              all ranks of this start have ended
    waiting                                                       once a second without ranks: ready for the next start

All have `node`, the number of the host.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

_MARK = "@neox "
_MAX_TEXT = 1500  # characters; pdsh cuts lines that are longer than its buffer
_MAX_UTF8_BYTES = 4  # of one character

Event = dict[str, Any]


def encode_event(event: Event) -> str:
    """Encode an event as one marked line, without the line end."""
    return _MARK + json.dumps(event, separators=(",", ":"))


def decode_event(line: str) -> Event | None:
    """Decode a marked line; return None for any other text."""
    if not line.startswith(_MARK):
        return None
    try:
        event = json.loads(line.removeprefix(_MARK))
    except json.JSONDecodeError:
        return None
    if isinstance(event, dict) and "kind" in event:
        return event
    return None


def text_events(event: Event, text: str) -> Iterator[Event]:
    """Yield copies of an event with a line of text. A long line is split, and `more` marks all pieces but the last."""
    for start in range(0, max(1, len(text)), _MAX_TEXT):
        end = start + _MAX_TEXT
        yield {**event, "text": text[start:end], "more": end < len(text)}


class LineBuffer:
    """Splitter of a stream of bytes into lines of text."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """Add bytes and return the lines that they complete, without line ends."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line.decode("utf-8", errors="replace").rstrip("\r") for line in lines]

    def pending(self) -> str:
        """Return the incomplete last line (for example a prompt), without the bytes of an incomplete character."""
        for cut in range(_MAX_UTF8_BYTES):
            try:
                return self._rest[: len(self._rest) - cut].decode()
            except UnicodeDecodeError:
                continue
        return ""

    def flush(self) -> list[str]:
        """Return the incomplete last line, if there is one, and forget it."""
        rest = self._rest
        self._rest = b""
        if not rest:
            return []
        return [rest.decode("utf-8", errors="replace")]
