"""One rank as its agent sees it: process, log file, output as events, stacks."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, BinaryIO

from neox.launch.events import Event, LineBuffer, text_events
from neox.launch.failures import begins_failure, failure_text, lacks_memory
from neox.launch.hosts.machine import memory_kills
from neox.launch.processes import parent_death_hook, process_state, signal_group

_MAX_KEPT_LINES = 1000  # stacks of many threads may follow the reason of an abort
_MAX_TAIL_LINES = 200
_READ_BYTES = 65536
_HOLD_SECONDS = 3.0  # Python ends sooner after a traceback, even with torch and DeepSpeed
_LAUNCHER_FRAMES = ('"<frozen runpy>"', "neox/launch/agent/bootstrap.py")  # at the bottom of every stack


class RankProcess:
    """The process of one rank.

    All its output goes to the log. The output of rank 0, and lines of other ranks that begin with `[rank `, become
    `line` events. A traceback becomes `tail` events if it ends the rank, and `line` events if it does not.

    Args:
        rank: Global rank.
        log_path: Path of the log file, which is appended to.
        tell: Function that receives the events.

    Attributes:
        code: `returncode` of the process; None while it runs.
        pipes: Its standard output ("out") and error ("err"), for a selector; `read` takes what is ready there.
    """

    def __init__(self, rank: int, log_path: Path, tell: Callable[[Event], None]) -> None:
        self.rank = rank
        self.log_path = log_path
        self.code: int | None = None
        self.pipes: dict[str, IO[bytes]] = {}
        self._tell_agent = tell
        self._log: BinaryIO = open(log_path, "ab", buffering=0)  # noqa: SIM115 (open as long as the process)
        self._log_failed = False
        if log_path.stat().st_size:
            self._write_log(f"--- started again at {time.strftime('%Y-%m-%d %H:%M:%S')} ---\n".encode())
        self._buffers = {"out": LineBuffer(), "err": LineBuffer()}
        self._shown_characters = {"out": 0, "err": 0}  # of the incomplete last line
        self._last_errors: deque[str] = deque(maxlen=_MAX_KEPT_LINES)  # lines on stderr
        self._held = _HeldLines()
        self._kills_before = memory_kills()
        self._was_killed_by_agent = False

    def start(self, command: Sequence[str], environment: Mapping[str, str], directory: str, stdin: str | None) -> None:
        """Start the process. Only the agent's main thread may call this.

        Args:
            command: Words of the command.
            environment: All its variables.
            directory: Its working directory.
            stdin: Path of the file that it reads as standard input; None for an empty input.
        """
        descriptor = _open_stdin(stdin)
        try:
            process = subprocess.Popen(
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
        self.follow(process)

    def follow(self, process: subprocess.Popen[bytes]) -> None:
        """Follow a process that leads a process group of its own and whose outputs are pipes."""
        self._process = process
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self.pipes = {"out": self._process.stdout, "err": self._process.stderr}
        for pipe in self.pipes.values():
            os.set_blocking(pipe.fileno(), False)
        self._tell({"kind": "start", "pid": self.pid})

    @property
    def pid(self) -> int:
        """Process id, which is also the id of the process group."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process has not been seen to end."""
        return self.code is None

    # -- output

    def read(self, name: str) -> bool:
        """Take the output that is there.

        Args:
            name: `out` or `err`.

        Returns:
            False if the output has ended; its pipe is then closed.
        """
        data = self._take_output(name)
        return data != b""

    def show_incomplete_lines(self) -> None:
        """Send the beginnings of rank 0's unfinished lines, for example a question to the user."""
        if self.rank != 0:
            return
        for name, buffer in self._buffers.items():
            if name == "err" and self._held.exist():
                continue
            pending = buffer.pending()
            new = pending[self._shown_characters[name] :]
            if new:
                for event in text_events({"kind": "line", "stream": name}, new):
                    self._tell({**event, "more": True})
                self._shown_characters[name] = len(pending)

    def show_survived_traceback(self) -> None:
        """Send the lines that were held back, if the rank would have ended by now because of them."""
        if self._held.are_old():
            self._show("err", self._held.take())

    def _take_output(self, name: str) -> bytes | None:
        """Read once from a pipe, and pass the data on.

        Returns:
            The data; None if there are none now, b"" if the output has ended.
        """
        pipe = self.pipes[name]
        try:
            data = os.read(pipe.fileno(), _READ_BYTES)
        except BlockingIOError:
            return None
        if data:
            self._write_log(data)
            self._take_lines(name, self._buffers[name].feed(data))
        else:
            self._take_lines(name, self._buffers[name].flush())
            pipe.close()
        return data

    def _take_lines(self, name: str, lines: Sequence[str]) -> None:
        for line in lines:
            if name == "err":
                self._last_errors.append(line)
            if self.rank == 0 or line.startswith("[rank "):
                self._show_or_hold(name, line)
            self._shown_characters[name] = 0

    def _show_or_hold(self, name: str, line: str) -> None:
        """Send a line, or hold it back if it may belong to a traceback that ends this rank."""
        may_end_rank = name == "err" and (self._held.exist() or begins_failure(line))
        if may_end_rank and self._shown_characters[name] == 0:
            self._held.add(line)
        else:
            self._show(name, [line])

    def _show(self, name: str, lines: Sequence[str]) -> None:
        for line in lines:
            for event in text_events({"kind": "line", "stream": name}, line[self._shown_characters[name] :]):
                self._tell(event)

    def _write_log(self, data: bytes) -> None:
        """Append to the log; a full disk must not end the run."""
        try:
            self._log.write(data)
        except OSError as error:
            if not self._log_failed:
                self._log_failed = True
                text = f"[rank {self.rank}] its log cannot be written, the run continues: {error}"
                self._tell({"kind": "line", "stream": "err", "text": text, "more": False})

    def _tell(self, event: Event) -> None:
        self._tell_agent({**event, "rank": self.rank})

    # -- end

    def poll(self) -> bool:
        """If the process has ended, take its last output, kill what it has started, and send `tail` and `exit` events.

        Returns:
            Whether it has ended since the last call.
        """
        if self.code is not None or self._process.poll() is None:
            return False
        signal_group(self.pid, signal.SIGKILL)
        for name, pipe in self.pipes.items():
            while not pipe.closed and self._take_output(name):
                pass
        code = self._process.returncode
        self._send_last_lines(code)
        self.code = code
        out_of_memory = self._was_killed_by_kernel(code) or lacks_memory(failure_text(list(self._last_errors)))
        killed = self._was_killed_by_agent
        self._tell({"kind": "exit", "code": code, "out_of_memory": out_of_memory, "killed": killed})
        self._log.close()
        return True

    def _send_last_lines(self, code: int) -> None:
        """Send the text of the failure as `tail` events, and lines before it that were held back as `line` events."""
        held = self._held.take()
        if code == 0:
            self._show("err", held)
            return
        tail = failure_text(list(self._last_errors))
        self._show("err", held[: max(0, len(held) - len(tail))])
        if len(tail) > _MAX_TAIL_LINES:
            half = _MAX_TAIL_LINES // 2
            tail = [*tail[:half], f"({len(tail) - 2 * half} lines are left out here)", *tail[-half:]]
        for line in tail:
            for event in text_events({"kind": "tail"}, line):
                self._tell(event)

    def _was_killed_by_kernel(self, code: int) -> bool:
        """Return whether the kernel has killed the process for lack of memory, by the kernel's counter."""
        if code != -signal.SIGKILL or self._was_killed_by_agent:
            return False
        kills = memory_kills()
        return kills is not None and kills != self._kills_before

    def signal(self, signum: int) -> None:
        """Signal the process, if it still runs."""
        if self.is_running:
            self._process.send_signal(signum)

    def kill(self) -> None:
        """Kill the process and everything it has started, if it still runs."""
        if self.is_running:
            self._was_killed_by_agent = True
            signal_group(self.pid, signal.SIGKILL)

    def stack_lines(self, log_size: int) -> list[str]:
        """Return the stacks that the fault handler wrote to the log after SIGUSR1, or one line that says why not.

        Args:
            log_size: Size of the log before the signal, in bytes.
        """
        if not self.is_running:
            return ["not running"]
        state = process_state(self.pid)
        if state == "T":
            return ["the process is stopped (SIGSTOP, a debugger, or job control): it cannot answer"]
        try:
            with open(self.log_path, "rb") as file:
                file.seek(log_size)
                lines = file.read().decode("utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            return [f"its log {self.log_path} has been removed"]
        stacks = []
        for line in lines:
            if not any(frame in line for frame in _LAUNCHER_FRAMES):
                stacks.append(line)
        return stacks or [f"no answer (process state {state}: not started yet, or waiting in the kernel)"]


class _HeldLines:
    """Lines of stderr from the first line of a traceback on, until it is known whether it ends the rank."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._last_time = 0.0

    def exist(self) -> bool:
        """Return whether lines are held back."""
        return bool(self._lines)

    def add(self, line: str) -> None:
        """Hold a line back."""
        self._lines.append(line)
        self._last_time = time.monotonic()

    def are_old(self) -> bool:
        """Return whether lines are held back although the rank had time to end after the last one."""
        return self.exist() and time.monotonic() - self._last_time > _HOLD_SECONDS

    def take(self) -> list[str]:
        """Return the lines and forget them."""
        lines = self._lines
        self._lines = []
        return lines


def _open_stdin(path: str | None) -> int:
    if path is not None:
        with suppress(OSError):  # sockets cannot be opened again
            return os.open(path, os.O_RDONLY)
    return subprocess.DEVNULL
