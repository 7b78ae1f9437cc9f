"""The keeper of one rank: starts the script, writes its log, and reports how it ended.

`python -m neox.launch.rank SOCKET FIRST_RANK LOG_DIR STDIN SCRIPT ARGUMENTS...`, started by DeepSpeed's per-node
launcher with RANK and its kin in the environment. That launcher hides a child's death by a signal (its exit status
becomes 0 further up) and permutes LOCAL_RANK where hosts differ in slots; this process knows both.

It lives as long as three others: the launcher (kernel tie), the agent (socket), the script (it reports and ends).
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import IO, BinaryIO

from neox.launch.events import Event, LineBuffer, encode_event, text_events
from neox.launch.lifeline import parent_death_hook, signal_group
from neox.launch.rendezvous import CPU_RANKS_VARIABLE
from neox.launch.tracebacks import explain

_KEPT_LINES = 400
_POLL_SECONDS = 0.1


class RankKeeper:
    """One rank's process, its log file and its line to the agent."""

    def __init__(self, agent: socket.socket, rank: int, log_path: Path) -> None:
        self.agent, self.rank = agent, rank
        self.log: BinaryIO = open(log_path, "ab", buffering=0)  # noqa: SIM115 (open as long as the process)
        self.log_failed = False
        if log_path.stat().st_size:
            self._write(f"--- started again at {time.strftime('%Y-%m-%d %H:%M:%S')} ---\n".encode())
        self.last_lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self.buffers: dict[str, LineBuffer] = {"out": LineBuffer(), "err": LineBuffer()}
        self.shown = {"out": 0, "err": 0}  # characters of an unfinished line that people have seen already

    def tell(self, event: Event) -> None:
        """Send an event to the agent; an agent that is gone is noticed by the read side."""
        with contextlib.suppress(OSError):
            self.agent.sendall(encode_event({**event, "rank": self.rank}).encode() + b"\n")

    def run(self, command: list[str], stdin: str | None) -> int:
        """Start the script, follow it to its end, report; return its `returncode`."""
        process = subprocess.Popen(
            command,
            stdin=_open_stdin(stdin if self.rank == 0 else None),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=parent_death_hook(),
        )
        self.tell({"kind": "start", "pid": process.pid, "keeper": os.getpid()})
        assert process.stdout is not None
        assert process.stderr is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.agent, selectors.EVENT_READ, "agent")
            for name, pipe in (("out", process.stdout), ("err", process.stderr)):
                os.set_blocking(pipe.fileno(), False)
                selector.register(pipe, selectors.EVENT_READ, name)
            while process.poll() is None:
                ready = selector.select(_POLL_SECONDS)
                for key, _ in ready:
                    if key.data == "agent":
                        self._agent_is_gone(process.pid)
                    elif not self._read(key.data, key.fileobj):  # type: ignore[arg-type]
                        selector.unregister(key.fileobj)
                if not ready and self.rank == 0:
                    self._show_unfinished_lines()
        self._read("out", process.stdout)
        self._read("err", process.stderr)
        signal_group(process.pid, signal.SIGKILL)  # whatever the rank started ends with it
        self._report(process.returncode)
        return process.returncode

    def _agent_is_gone(self, pid: int) -> None:
        """The agent never writes: a readable socket is its end, and so ours."""
        signal_group(pid, signal.SIGKILL)
        os._exit(1)

    def _read(self, name: str, pipe: IO[bytes]) -> bool:
        """Take what a pipe holds into the log and to the agent; False at its end."""
        while True:
            try:
                data = os.read(pipe.fileno(), 65536)
            except BlockingIOError:
                return True
            if not data:
                self._lines(name, self.buffers[name].flush())
                return False
            self._write(data)
            self._lines(name, self.buffers[name].feed(data))

    def _write(self, data: bytes) -> None:
        """Add to the log; a full disk costs the log, not the run."""
        try:
            self.log.write(data)
        except OSError as error:
            if not self.log_failed:
                self.log_failed = True
                text = f"[rank {self.rank}] its log cannot be written, the run goes on: {error}"
                self.tell({"kind": "line", "stream": "err", "text": text, "more": False})

    def _lines(self, name: str, lines: list[str]) -> None:
        """Keep lines for a traceback; show rank 0's, and what other ranks marked as theirs."""
        for line in lines:
            if name == "err":
                self.last_lines.append(line)
            if self.rank == 0 or line.startswith("[rank "):
                for event in text_events({"kind": "line", "stream": name}, line[self.shown[name] :]):
                    self.tell(event)
            self.shown[name] = 0

    def _show_unfinished_lines(self) -> None:
        """Someone may be waiting for an answer to a prompt without a line end."""
        for name, buffer in self.buffers.items():
            pending = buffer.pending()
            if len(pending) > self.shown[name]:
                for event in text_events({"kind": "line", "stream": name}, pending[self.shown[name] :]):
                    self.tell({**event, "more": True})
                self.shown[name] = len(pending)

    def _report(self, returncode: int) -> None:
        tail = explain(list(self.last_lines)) if returncode else []
        for line in tail[-200:]:
            for event in text_events({"kind": "tail"}, line):
                self.tell(event)
        self.tell({"kind": "exit", "code": returncode})


def _open_stdin(path: str | None) -> int:
    """Rank 0 of a local run reads what the head process was given; everyone else reads nothing."""
    if path is not None:
        with contextlib.suppress(OSError):  # sockets cannot be opened again
            return os.open(path, os.O_RDONLY)
    return subprocess.DEVNULL


def main(argv: list[str]) -> int:
    """Run the keeper; the agent, not this exit status, tells the result onwards."""
    agent_path, first_rank, log_dir, stdin, *command = argv
    # DeepSpeed's launcher signals its children when it is signalled; when to stop a rank is the agent's decision.
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: None)
    rank = int(os.environ["RANK"])
    os.environ["LOCAL_RANK"] = str(rank - int(first_rank))
    if os.environ.pop(CPU_RANKS_VARIABLE, None):  # the launcher has just made GPUs visible that were hidden
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with socket.socket(socket.AF_UNIX) as agent:
        agent.connect(agent_path)
        keeper = RankKeeper(agent, rank, Path(log_dir) / f"rank_{rank:04d}.log")
        script = [sys.executable, "-u", "-m", "neox.launch.bootstrap", *command]
        keeper.run(script, stdin or None)
        return 0  # a failure would make DeepSpeed's launcher end the other ranks, at once and by a signal of its own


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
