"""One rank as its agent sees it (process, log file, output as events, stacks), and the watchdog of a host's ranks.

`python -m neox.launch.rank_process` is the watchdog: a process that kills what ranks have started when their agent has
died. It reads `+PID` and `-PID` lines; at the end of its input, which is the end of the agent, it kills the process
groups that were added and not removed. (A rank itself dies with the agent; its children do not.)
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, BinaryIO

from neox.launch.events import Event, LineBuffer, text_events
from neox.launch.failures import failure_text, lacks_memory
from neox.launch.lifeline import parent_death_hook, process_state, signal_group
from neox.launch.machine import memory_kills

_MAX_KEPT_LINES = 400
_MAX_TAIL_LINES = 200
_LAUNCHER_FRAMES = ('"<frozen runpy>"', "neox/launch/bootstrap.py")  # at the bottom of every stack


class RankProcess:
    """The process of one rank.

    The output of rank 0, and lines of other ranks that begin with `[rank `, become events; all output goes to the log.

    Args:
        rank: Global rank.
        log_path: The log file, which is appended to.
        tell: Receives the events.

    Attributes:
        code: The process's `returncode`; None while it runs.
        pipes: Its standard output and error, for a selector, which are ready for `read`.
    """

    def __init__(self, rank: int, log_path: Path, tell: Callable[[Event], None]) -> None:
        self.rank, self.log_path = rank, log_path
        self.code: int | None = None
        self.pipes: dict[str, IO[bytes]] = {}
        self._tell_agent = tell
        self._log: BinaryIO = open(log_path, "ab", buffering=0)  # noqa: SIM115 (open as long as the process)
        self._log_failed = False
        if log_path.stat().st_size:
            self._write(f"--- started again at {time.strftime('%Y-%m-%d %H:%M:%S')} ---\n".encode())
        self._last_lines: deque[str] = deque(maxlen=_MAX_KEPT_LINES)
        self._buffers = {"out": LineBuffer(), "err": LineBuffer()}
        self._kills_before = memory_kills()
        self._was_killed = False  # by its agent
        self._shown = {"out": 0, "err": 0}  # characters of an incomplete line that were sent already

    def start(self, command: Sequence[str], environment: Mapping[str, str], directory: str, stdin: str | None) -> None:
        """Start the process, from the agent's main thread.

        Args:
            command: The command.
            environment: All its variables.
            directory: Its working directory.
            stdin: The file that it reads as standard input; None for nothing.
        """
        descriptor = _open_stdin(stdin)
        try:
            self._process = subprocess.Popen(
                command,
                env=dict(environment),
                cwd=directory,
                stdin=descriptor,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                preexec_fn=parent_death_hook(),
            )
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self.pipes = {"out": self._process.stdout, "err": self._process.stderr}
        for pipe in self.pipes.values():
            os.set_blocking(pipe.fileno(), False)
        self._tell({"kind": "start", "pid": self.pid})

    @property
    def pid(self) -> int:
        """Process id, and the id of the process group."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process has not been seen to end."""
        return self.code is None

    def read(self, name: str) -> bool:
        """Take the output that is there.

        Args:
            name: `out` or `err`.

        Returns:
            False at the end of the output, where the pipe is closed.
        """
        data = self._take_output(name)
        return data is None or bool(data)

    def poll(self) -> bool:
        """Look whether the process has ended; if so, take its last output, kill what it has started, and report.

        Returns:
            Whether it has ended, which is true once.
        """
        if self.code is not None or self._process.poll() is None:
            return False
        signal_group(self.pid, signal.SIGKILL)
        for name, pipe in self.pipes.items():
            while not pipe.closed and self._take_output(name):
                pass
        code = self._process.returncode
        for line in failure_text(list(self._last_lines))[-_MAX_TAIL_LINES:] if code else ():
            for event in text_events({"kind": "tail"}, line):
                self._tell(event)
        self.code = code
        by_kernel = (
            code == -signal.SIGKILL and not self._was_killed and memory_kills() not in (None, self._kills_before)
        )
        self._tell({"kind": "exit", "code": code, "out_of_memory": by_kernel or lacks_memory(list(self._last_lines))})
        return True

    def signal(self, signum: int) -> None:
        """Signal the process, if it still runs."""
        if self.is_running:
            self._process.send_signal(signum)

    def kill(self) -> None:
        """Kill the process and everything it has started, if it still runs."""
        if self.is_running:
            self._was_killed = True
            signal_group(self.pid, signal.SIGKILL)

    def show_incomplete_lines(self) -> None:
        """Send lines that have not ended, if this is rank 0: a question to the user, for example."""
        for name, buffer in self._buffers.items() if self.rank == 0 else ():
            pending = buffer.pending()
            if len(pending) > self._shown[name]:
                for event in text_events({"kind": "line", "stream": name}, pending[self._shown[name] :]):
                    self._tell({**event, "more": True})
                self._shown[name] = len(pending)

    def stack_lines(self, log_size: int) -> list[str]:
        """Return the answer to SIGUSR1, the stacks that the fault handler wrote to the log, or why there are none.

        Args:
            log_size: Size of the log, in bytes, before the signal.
        """
        if not self.is_running:
            return ["not running"]
        state = process_state(self.pid)
        if state == "T":
            return ["the process is stopped (SIGSTOP, a debugger, or job control): it cannot answer"]
        with open(self.log_path, "rb") as file:
            file.seek(log_size)
            lines = file.read().decode("utf-8", errors="replace").splitlines()
        lines = [line for line in lines if not any(frame in line for frame in _LAUNCHER_FRAMES)]
        return lines or [f"no answer (process state {state}: not started yet, or waiting in the kernel)"]

    def _take_output(self, name: str) -> bytes | None:
        """Read once; return None where nothing is there now, and nothing at the end."""
        try:
            data = os.read(self.pipes[name].fileno(), 65536)
        except BlockingIOError:
            return None
        self._write(data)
        self._take_lines(name, self._buffers[name].feed(data) if data else self._buffers[name].flush())
        if not data:
            self.pipes[name].close()
        return data

    def _tell(self, event: Event) -> None:
        self._tell_agent({**event, "rank": self.rank})

    def _write(self, data: bytes) -> None:
        """Append to the log; a full disk must not end the run."""
        try:
            self._log.write(data)
        except OSError as error:
            if not self._log_failed:
                self._log_failed = True
                text = f"[rank {self.rank}] its log cannot be written, the run goes on: {error}"
                self._tell({"kind": "line", "stream": "err", "text": text, "more": False})

    def _take_lines(self, name: str, lines: Sequence[str]) -> None:
        for line in lines:
            if name == "err":
                self._last_lines.append(line)
            if self.rank == 0 or line.startswith("[rank "):
                for event in text_events({"kind": "line", "stream": name}, line[self._shown[name] :]):
                    self._tell(event)
            self._shown[name] = 0


def _open_stdin(path: str | None) -> int:
    if path is not None:
        with suppress(OSError):  # sockets cannot be opened again
            return os.open(path, os.O_RDONLY)
    return subprocess.DEVNULL


class Watchdog:
    """The agent's side of the watchdog process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "neox.launch.rank_process"],
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
        """Return whether the process has ended, and protects nothing any more."""
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
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    for pid in groups:
        signal_group(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
