"""Orders from the launcher to the agents of a restartable run, as JSON lines on their standard input.

The agent on this machine is a child process of the launcher; each agent on another host has its own ssh connection.
There are three kinds of orders:

- start the ranks again, after a failure, or for the first time on a spare host;
- end the ranks of a start, because another host has failed; the agent keeps running;
- handle a signal as if it had been sent to the agent.
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
    """Return the order to start ranks."""
    return {"start": spec.encode()}


def end_order(spec: LaunchSpec) -> LauncherOrder:
    """Return the order to end the ranks of a start."""
    return {"end": spec.run_id}


def signal_order(signum: int) -> LauncherOrder:
    """Return the order to handle a signal."""
    return {"signal": int(signum)}


def encode_order(order: LauncherOrder) -> bytes:
    """Encode an order as a line."""
    return json.dumps(order).encode() + b"\n"


class Orders:
    """Orders received by an agent. A thread reads them, and the agent's main thread executes them."""

    def __init__(self) -> None:
        self._buffer = LineBuffer()
        self._starts: SimpleQueue[LaunchSpec] = SimpleQueue()
        self._ended = ""  # run_id of the start whose ranks are to be ended

    def feed(self, data: bytes) -> None:
        """Process bytes from the launcher."""
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

    def say_to_end(self, spec: LaunchSpec) -> bool:
        """Return whether the launcher has ordered the end of a start's ranks."""
        return self._ended == spec.run_id

    def next_start(self, seconds: float) -> LaunchSpec | None:
        """Wait for the next start; return None after a number of seconds without one."""
        with suppress(Empty):
            return self._starts.get(timeout=seconds)
        return None
