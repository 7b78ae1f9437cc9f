"""Orders of the launcher to the agents of a run that may be started again, as lines of JSON on their standard input.

The agent of this machine is a child of the launcher; that of another host is reached through an ssh connection of its
own. An agent takes three orders:

- the next start, after its ranks have failed, or while it waits on a spare host;
- the end of a start's ranks, because another host has failed. The agent stays;
- a signal, which it takes as if it had been sent to it.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from neox.launch.events import LineBuffer
from neox.launch.spec import LaunchSpec

LauncherOrder = dict[str, Any]


def start_order(spec: LaunchSpec) -> LauncherOrder:
    """Return the order to begin a start."""
    return {"start": spec.encode()}


def end_order(spec: LaunchSpec) -> LauncherOrder:
    """Return the order to end the ranks of a start."""
    return {"end": spec.run_id}


def signal_order(number: int) -> LauncherOrder:
    """Return the order to take a signal."""
    return {"signal": int(number)}


def encode_order(order: LauncherOrder) -> bytes:
    """Encode an order as a line."""
    return json.dumps(order).encode() + b"\n"


class Orders:
    """Orders as an agent takes them. A thread reads them, and the agent's main thread obeys."""

    def __init__(self) -> None:
        self._buffer = LineBuffer()
        self._starts: SimpleQueue[LaunchSpec] = SimpleQueue()
        self._ended = ""  # run_id of the start whose ranks are to be ended

    def feed(self, data: bytes) -> None:
        """Take what the launcher has written."""
        for line in self._buffer.feed(data):
            self._take(json.loads(line))

    def _take(self, order: LauncherOrder) -> None:
        if "start" in order:
            self._starts.put(LaunchSpec.decode(order["start"]))
        elif "end" in order:
            self._ended = order["end"]
        elif "signal" in order:
            with suppress(ProcessLookupError):
                os.kill(os.getpid(), order["signal"])

    def has_ended(self, spec: LaunchSpec) -> bool:
        """Return whether the ranks of a start are to be ended."""
        return self._ended == spec.run_id

    def next_start(self, seconds: float) -> LaunchSpec | None:
        """Wait for the next start; return None if there is none after some seconds."""
        with suppress(Empty):
            return self._starts.get(timeout=seconds)
        return None
