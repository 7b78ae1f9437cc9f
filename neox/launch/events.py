"""Events that a host's agent sends to the launcher, one JSON object per line.

They are written to the agent's standard output: a pipe, or ssh under pdsh. Any other line there is text for people.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from neox.launch.failures import failure_cause

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


class PlainOutput:
    """Printer of an agent's events for people, used if no launcher process reads them (`launcher: none`).

    Args:
        rank_bytes: The plan's estimate of the memory of the fullest rank.
    """

    def __init__(self, rank_bytes: int | None = None) -> None:
        self._rank_bytes = rank_bytes
        self._tails: defaultdict[int, str] = defaultdict(str)

    def take(self, event: Event) -> None:
        """Print an event: each line at once, and the last lines of ranks that fail."""
        end = "" if event.get("more") else "\n"
        if event["kind"] == "line":
            stream = sys.stdout if event["stream"] == "out" else sys.stderr
            print(event["text"], end=end, file=stream, flush=True)
        elif event["kind"] == "tail":
            self._tails[event["rank"]] += event["text"] + end
        elif event["kind"] == "exit" and event["code"] != 0:
            how = failure_cause(event["code"], event.get("out_of_memory", False), self._rank_bytes)
            tail = self._tails[event["rank"]]
            print(f"error: rank {event['rank']} ended with {how}; its last lines:\n{tail}", file=sys.stderr)
        elif event["kind"] == "hang":
            print(f"no rank here made progress for {event['seconds']:.0f} s (hang_timeout)", file=sys.stderr)
