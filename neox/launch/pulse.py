"""Whether the head process is still there, seen from the hosts: its pulse on the agents' standard input.

The end of that input is the end of the head process or of ssh. A network that is cut sends no end: the kernel goes on
waiting for minutes or hours. So over ssh the head process also writes a byte every other second, and an agent that has
heard the first one and then nothing for `LOST_SECONDS` takes its ranks down. (The other way round ssh's own
ServerAliveInterval tells the head process.) Both sides are threads: a terminal that is paused or a pipe that is full
may block their main threads for long.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Callable, Sequence
from typing import Any

LOST_SECONDS = 30.0
_EVERY_SECONDS = 2.0
_BEAT, _PAUSE = b".", b"p"


class Pulse:
    """The head process's side: a context manager that writes to file descriptors until it is left.

    Ctrl-Z stops this thread with its process; the hosts are told before, and wait.
    """

    def __init__(self, descriptors: Sequence[int]) -> None:
        self._descriptors = tuple(descriptors)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._former: Any = None

    def __enter__(self) -> Pulse:
        self._former = signal.signal(signal.SIGTSTP, self._suspend)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        signal.signal(signal.SIGTSTP, self._former)

    def _beat(self) -> None:
        self._write(_BEAT)
        while not self._ended.wait(_EVERY_SECONDS):
            self._write(_BEAT)

    def _write(self, byte: bytes) -> None:
        for descriptor in self._descriptors:
            with contextlib.suppress(OSError):  # its end is noticed where its output is read
                os.write(descriptor, byte)

    def _suspend(self, *_: object) -> None:
        self._write(_PAUSE)
        os.kill(os.getpid(), signal.SIGSTOP)


def follow_pulse(descriptor: int, lost: Callable[[], None], seconds: float = LOST_SECONDS) -> threading.Thread:
    """The agent's side: call `lost` from a thread at the end of the input, or after `seconds` without a beat."""

    def follow() -> None:
        limit: float | None = None  # the head process of a local run sends no beats: its end is always seen
        while select.select([descriptor], [], [], limit)[0]:
            data = os.read(descriptor, 4096)
            if not data:
                break
            limit = None if data.endswith(_PAUSE) else seconds
        lost()

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    return thread
