"""Watchdog of a host's ranks: a process that kills what they have started when their agent has died.

A rank itself dies with the agent; its children do not. `python -m neox.launch.agent.watchdog` reads `+PID` and `-PID`
lines. Its input ends with the agent; it then kills the process groups that were added and not removed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress

from neox.launch.processes import signal_group


class Watchdog:
    """The agent's side of the watchdog process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "neox.launch.agent.watchdog"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # a terminal's Ctrl-C is for the agent
        )

    def add(self, pid: int) -> None:
        """Add the process group that `pid` leads."""
        self._write(f"+{pid}\n")

    def remove(self, pid: int) -> None:
        """Remove a process group that has ended."""
        self._write(f"-{pid}\n")

    def has_ended(self) -> bool:
        """Return whether the process has ended, so that it protects nothing any more."""
        return self._process.poll() is not None

    def close(self) -> None:
        """End the process; it kills the groups that are left."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        self._process.wait()

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError, ValueError):  # it has ended, or the agent's other thread is closing it
            os.write(self._process.stdin.fileno(), line.encode())


def main() -> None:
    """Follow the agent to its end."""
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        pid = int(line[1:])
        if line.startswith("+"):
            groups.add(pid)
        else:
            groups.discard(pid)
    for pid in groups:
        signal_group(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
