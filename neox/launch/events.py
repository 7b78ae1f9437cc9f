"""Events that a host's agent sends to the launcher, one JSON object a line, and the text of failures in them.

They are written to the agent's standard output: a pipe, or ssh under pdsh. Any other line there is text for people.
"""

from __future__ import annotations

import json
import re
import signal
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

_MARK = "@neox "
_MAX_TEXT = 1500  # characters; pdsh cuts lines that are longer than its buffer

_START = "Traceback (most recent call last):"
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_FATAL = ("Fatal Python error:", "terminate called", "Segmentation fault")
_SECONDARY = re.compile(
    r"Connection (reset|closed) by peer|Connection refused|Broken pipe|remote process exited|Socket Timeout"
    r"|NCCL (error|communicator was aborted)|Software caused connection abort|recvValue failed"
    r"|store is being destroyed",
    re.IGNORECASE,
)
_NO_MEMORY = re.compile(r"^MemoryError|can't allocate memory|std::bad_alloc|out of memory", re.IGNORECASE)
_MAX_LINES = 20

Event = dict[str, Any]


def encode_event(event: Event) -> str:
    """Encode an event as one marked line, without the line end."""
    return _MARK + json.dumps(event, separators=(",", ":"))


def decode_event(line: str) -> Event | None:
    """Decode a marked line; return None for any other text."""
    if not line.startswith(_MARK):
        return None
    try:
        event = json.loads(line[len(_MARK) :])
    except json.JSONDecodeError:
        return None
    return event if isinstance(event, dict) and "kind" in event else None


def text_events(event: Event, text: str) -> Iterator[Event]:
    """Yield copies of an event with a line of text, split where it is long; `more` marks an incomplete line."""
    pieces = [text[i : i + _MAX_TEXT] for i in range(0, len(text), _MAX_TEXT)] or [""]
    for number, piece in enumerate(pieces):
        yield {**event, "text": piece, "more": number + 1 < len(pieces)}


class LineBuffer:
    """Splitter of a stream of bytes into lines of text."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """Add bytes and return the lines that they complete, without line ends."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line.decode("utf-8", errors="replace").rstrip("\r") for line in lines]

    def pending(self) -> str:
        """Return the incomplete last line (a prompt, for example) as far as its characters are complete."""
        for cut in range(min(4, len(self._rest))):
            try:
                return self._rest[: len(self._rest) - cut].decode()
            except UnicodeDecodeError:
                continue
        return ""

    def flush(self) -> list[str]:
        """Return the incomplete last line, if there is one, and forget it."""
        rest, self._rest = self._rest, b""
        return [rest.decode("utf-8", errors="replace")] if rest else []


class PlainOutput:
    """Printer of an agent's events for people, where no launcher process reads them (`launcher: none`).

    Args:
        rank_bytes: The plan's estimate of the memory of the fullest rank.
    """

    def __init__(self, rank_bytes: int | None = None) -> None:
        self._rank_bytes = rank_bytes
        self._tails: defaultdict[int, str] = defaultdict(str)

    def take(self, event: Event) -> None:
        """Print an event: a line as it comes, and the last lines of ranks that fail."""
        end = "" if event.get("more") else "\n"
        if event["kind"] == "line":
            print(event["text"], end=end, file=sys.stdout if event["stream"] == "out" else sys.stderr, flush=True)
        elif event["kind"] == "tail":
            self._tails[event["rank"]] += event["text"] + end
        elif event["kind"] == "exit" and event["code"] != 0:
            how = failure_cause(event["code"], event.get("out_of_memory", False), self._rank_bytes)
            tail = self._tails[event["rank"]]
            print(f"error: rank {event['rank']} ended with {how}; its last lines:\n{tail}", file=sys.stderr)
        elif event["kind"] == "hang":
            print(f"no rank here made progress for {event['seconds']:.0f} s (hang_timeout)", file=sys.stderr)


def failure_text(lines: Sequence[str]) -> list[str]:
    """Return the last traceback among `lines`, with the exceptions that it is chained to, else the last lines."""
    starts = [number for number, line in enumerate(lines) if line.strip() == _START]
    fatal = [number for number, line in enumerate(lines) if line.startswith(_FATAL)]
    if fatal and (not starts or fatal[-1] > starts[-1]):
        return list(lines[fatal[-1] :])
    if not starts:
        return list(lines[-_MAX_LINES:])
    first = starts[-1]
    for earlier in reversed(starts[:-1]):
        if not any(line.startswith(_CHAINED) for line in lines[earlier:first]):
            break
        first = earlier
    return list(lines[first:])


def lacks_memory(lines: Sequence[str]) -> bool:
    """Return whether the last lines of a rank say that memory could not be allocated, on a CPU or a GPU."""
    return any(_NO_MEMORY.search(line) for line in lines[-8:])


def failure_cause(code: int, out_of_memory: bool, rank_bytes: int | None) -> str:
    """Return how a rank ended, for messages.

    Args:
        code: Its `returncode`.
        out_of_memory: Whether it lacked memory.
        rank_bytes: The plan's estimate of the memory of the fullest rank; None where it is not known.
    """
    how = f"exit status {code}" if code > 0 else f"signal {-code} ({_signal_name(-code)})"
    if not out_of_memory:
        return how
    planned = (
        "" if rank_bytes is None else f"; the plan's estimate for the fullest rank is {rank_bytes / 2**30:.2f} GiB"
    )
    who = "killed by the kernel for lack of memory" if code < 0 else "memory could not be allocated"
    return f"{how}: {who}{planned}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def is_secondary(lines: Sequence[str]) -> bool:
    """Return whether a failure looks like the consequence of another rank's end: a connection that its peer closed."""
    return any(_SECONDARY.search(line) for line in lines[-8:])
