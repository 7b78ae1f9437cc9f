"""Runs that a command starts as processes of its own, such as measured layouts and the runs of a sweep."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from types import FrameType

from neox.launch.processes import parent_death_hook

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class ChildRuns:
    """Processes of `deepy.py`. A stop signal of this process ends them as SIGTERM does; a second one kills them.

    Ranks end with their launcher, and the launcher ends with this process. Start them from the main thread.

    Attributes:
        stopped_by: Number of the signal that asked this process to end; None before it.
    """

    def __init__(self) -> None:
        self.stopped_by: int | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        self._handlers: dict[int, object] = {}

    def __enter__(self) -> ChildRuns:
        for number in _STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as SIGHUP is under nohup
                self._handlers[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self._processes:
            if process.poll() is None:  # after an error
                process.kill()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # returned by `signal.signal`

    def start(self, command: Sequence[str], output: int) -> subprocess.Popen[bytes]:
        """Start a command without input, whose output goes to a file descriptor. Raises OSError."""
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a terminal's Ctrl-C reaches only this process, which passes it on
            preexec_fn=parent_death_hook(signal.SIGTERM),
        )
        self._processes.append(process)
        if self.stopped_by is not None:  # a signal arrived during the start
            process.terminate()
        return process

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        is_second = self.stopped_by is not None
        self.stopped_by = number
        for process in self._processes:
            if process.returncode is None:
                os.kill(process.pid, signal.SIGKILL if is_second else signal.SIGTERM)


def last_line(output: str, status: int) -> str:
    """Return the reason of a failure: the last line that a run printed."""
    lines = [line for line in output.splitlines() if line.strip()]
    if not lines:
        return f"the run exited with status {status}"
    return lines[-1].strip()
