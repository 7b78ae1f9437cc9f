"""Supervision of a run by the launcher process: starts the agents, shows rank 0, ends all at the first failure.

The run's exit status is that of the rank that failed first (a signal is 128 + its number); its host, number and
traceback are the last output; no process of the run is left.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TextIO

from neox.files import write_text
from neox.launch.agent_files import ANSWER_SECONDS
from neox.launch.events import Event, LineBuffer, decode_event
from neox.launch.failures import failure_cause, is_secondary
from neox.launch.lifeline import LOST_SECONDS, exit_status, parent_death_hook
from neox.launch.spec import LaunchSpec

_POLL_SECONDS = 0.1
_WINDOW_SECONDS = 1.5  # after the first failure: other hosts' reports, to tell the cause from its consequences
_END_SECONDS = 4.0
_LIFELINE_SECONDS = 3.0
_HANG_SECONDS = 6.0
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_CONNECTION_ENDED = re.compile(r"pdsh@\S+: (?P<host>\S+): (?P<how>ssh (?:exited with exit code|killed by signal) \d+)")

SignalAgents = Callable[[int], None]  # on all hosts


@dataclass
class _Failure:
    """Failure of one rank: its `returncode`, whether it lacked memory, and its last lines."""

    rank: int
    code: int
    out_of_memory: bool
    tail: list[str] = field(default_factory=list)


class Supervisor:
    """Supervisor of one run.

    Args:
        spec: The run.
        commands: The commands to start, which end when the agents end.
        signal_agents: Sends a signal to all agents; by default to the commands' processes, which are agents on this
            machine.
    """

    def __init__(
        self, spec: LaunchSpec, commands: Sequence[Sequence[str]], signal_agents: SignalAgents | None = None
    ) -> None:
        self.spec, self.commands = spec, commands
        self.signal_agents = signal_agents or self._signal_children
        self.processes: list[subprocess.Popen[bytes]] = []
        self.buffers: dict[int, LineBuffer] = {}
        self.open_lines: dict[int, str] = {}
        self.tails: dict[int, list[str]] = {}
        self.failures: list[_Failure] = []
        self.nodes_done: dict[int, int] = {}
        self.heard: dict[int, float] = {}
        self.lost: dict[int, str] = {}
        self.hung = False
        self.stacks: list[str] = []
        self.nodes_shown: set[int] = set()
        self.stop_signal: int | None = None
        self.end_at: float | None = None

    def run(self, environment: Mapping[str, str] | None = None) -> int:
        """Start every command, follow them to the end, and return the run's exit status.

        Args:
            environment: Variables of the commands; this process's when left out.
        """
        caught = [number for number in _STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]  # nohup
        previous = {number: signal.signal(number, self._on_signal) for number in caught}
        try:
            with selectors.DefaultSelector() as selector:
                for command in self.commands:
                    self._start(list(command), selector, environment)
                self._watch(selector)
        finally:
            self._end_all()
            for number, handler in previous.items():
                signal.signal(number, handler)
        return self._conclude()

    def _start(self, command: list[str], selector: selectors.BaseSelector, env: Mapping[str, str] | None) -> None:
        process = subprocess.Popen(
            command,
            env=None if env is None else dict(env),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches this process alone, which passes it on
            preexec_fn=parent_death_hook(signal.SIGTERM),
        )
        self.processes.append(process)
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            self.buffers[pipe.fileno()] = LineBuffer()
            selector.register(pipe, selectors.EVENT_READ)

    # -- watching

    def _watch(self, selector: selectors.BaseSelector) -> None:
        stopped = False
        while selector.get_map():
            for key, _ in selector.select(_POLL_SECONDS):
                if not self._read(key.fileobj):  # type: ignore[arg-type]
                    selector.unregister(key.fileobj)
            if self.stop_signal is not None and not stopped:
                stopped = True
                name, limit = signal.Signals(self.stop_signal).name, self.spec.stop_timeout
                self._print_error(
                    f"{name}: the ranks have {limit:.0f} s to save and end, those that do not answer "
                    f"{min(ANSWER_SECONDS, limit):.0f} s (a second signal ends them now)"
                )
                self.signal_agents(self.stop_signal)
                self.end_at = time.monotonic() + self.spec.stop_timeout + _END_SECONDS
            now = time.monotonic()
            self._check_heartbeats(now)
            if self.end_at is not None and now >= self.end_at:
                return

    def _read(self, pipe: IO[bytes]) -> bool:
        try:
            data = os.read(pipe.fileno(), 65536)
        except BlockingIOError:
            return True
        buffer = self.buffers[pipe.fileno()]
        for line in buffer.feed(data) if data else buffer.flush():
            self._take_line(line)
        return bool(data)

    def _take_line(self, line: str) -> None:
        _, mark, rest = line.partition(": ")  # pdsh writes `host: ` in front of every line
        event = decode_event(line) or (decode_event(rest) if mark else None)
        if event is not None:
            self._take(event)
        elif match := _CONNECTION_ENDED.match(line):
            self._connection_ended(match["host"], match["how"])
        elif line.strip():
            self._print_error(line)

    def _connection_ended(self, host: str, how: str) -> None:
        """Handle pdsh's message about an ssh that failed, unless the agent there has reported its end."""
        node = next((number for number, known in enumerate(self.spec.hosts) if known.name == host), None)
        if node is not None and node not in self.nodes_done:
            self._lose(node, how)

    def _lose(self, node: int, how: str) -> None:
        if node not in self.lost:
            self.lost[node] = how
            self._end_in(_WINDOW_SECONDS)

    def _check_heartbeats(self, now: float) -> None:
        for node, heard in self.heard.items():
            if node not in self.nodes_done and now - heard > LOST_SECONDS:
                self._lose(node, f"nothing heard for {LOST_SECONDS:.0f} s")

    def _take(self, event: Event) -> None:
        kind = event["kind"]
        self.heard[event["node"]] = time.monotonic()
        if kind == "line":
            self._show(event)
            if self.hung and event["rank"] < 0:  # an agent's, which collects its ranks' stacks
                self.stacks.append(event["text"] + ("" if event["more"] else "\n"))
        elif kind == "tail":
            self._add_tail(event)
        elif kind == "exit" and event["code"] != 0:
            failure = _Failure(
                event["rank"], event["code"], event.get("out_of_memory", False), self.tails.get(event["rank"], [])
            )
            self.failures.append(failure)
            if self.stop_signal is None:
                self._end_in(_WINDOW_SECONDS)
            elif failure.code not in (-self.stop_signal, 128 + self.stop_signal):  # others cannot save without it
                self.end_at = min(self.end_at or math.inf, time.monotonic() + _WINDOW_SECONDS)
        elif kind == "hang" and not self.hung:
            self.hung = True
            seconds = event["seconds"]
            self._print_error(f"no rank made progress for {seconds:.0f} s (hang_timeout): every rank's stacks follow")
            self.signal_agents(signal.SIGUSR1)
            self._end_in(_HANG_SECONDS)
        elif kind == "stacks" and self.hung:
            self.nodes_shown.add(event["node"])
            if len(self.nodes_shown) == len(self.spec.hosts):
                self.end_at = time.monotonic() + _POLL_SECONDS
        elif kind == "done":
            self.nodes_done[event["node"]] = event["code"]

    def _end_in(self, seconds: float) -> None:
        if self.end_at is None:
            self.end_at = time.monotonic() + seconds

    def _show(self, event: Event) -> None:
        end = "" if event["more"] else "\n"
        self._print(event["text"], sys.stdout if event["stream"] == "out" else sys.stderr, end)

    def _add_tail(self, event: Event) -> None:
        rank = event["rank"]
        text = self.open_lines.pop(rank, "") + event["text"]
        if event["more"]:
            self.open_lines[rank] = text
        else:
            self.tails.setdefault(rank, []).append(text)

    # -- ending

    def _on_signal(self, number: int, _frame: Any) -> None:
        if self.stop_signal is not None:  # asked twice: now
            self.end_at = time.monotonic()
        self.stop_signal = signal.SIGTERM if number == signal.SIGHUP else number  # which ranks know to save at

    def _signal_children(self, number: int) -> None:
        """Signal the local agents, which are child processes."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)

    def _end_all(self) -> None:
        """Close every agent's standard input, at whose end it kills its ranks, then kill what is left."""
        for process in self.processes:
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
        self._wait_for_all(_LIFELINE_SECONDS)
        for process in self.processes:  # srun and mpirun pass no standard input on
            if process.poll() is None:
                process.terminate()
        self._wait_for_all(_END_SECONDS)
        for process in self.processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _wait_for_all(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.01, deadline - time.monotonic()))

    # -- the result

    def _conclude(self) -> int:
        """Return the exit status, and print why, with the first failure's traceback last."""
        if self.hung:
            self._print_error(f"ended: the run hung; {self._write_stacks()}")
            return 124
        failures = [failure for failure in self.failures if not self._was_asked_to_end(failure)]
        cause = next((failure for failure in failures if not is_secondary(failure.tail)), None)
        if cause is None and failures and len(failures) == len(self.failures):  # else they follow one that was asked to
            cause = failures[0]
        if cause is not None:
            self._explain(cause)
            return exit_status(cause.code)
        if self.failures and self.stop_signal is not None:
            return 128 + self.stop_signal
        if len(self.nodes_done) == len(self.spec.hosts):
            return max(self.nodes_done.values())
        if self.stop_signal is not None:
            return 128 + self.stop_signal
        if self.lost:
            for node, how in self.lost.items():
                self._print_error(f"error: lost {self.spec.hosts[node].name} ({how}); the run was ended on every host")
            return 1
        missing = [h.name for number, h in enumerate(self.spec.hosts) if number not in self.nodes_done]
        self._print_error(f"error: the run ended on {', '.join(missing)} without a report about its ranks")
        return max([exit_status(process.returncode) for process in self.processes] + [1])

    def _write_stacks(self) -> str:
        """Write every rank's stacks to one file of the run directory, and say where they are."""
        directory = Path(self.spec.run_directory)
        try:
            write_text(directory / "stacks.txt", "".join(self.stacks))
        except OSError as error:
            return f"stacks.txt cannot be written ({error.strerror}); the logs in {directory / 'ranks'} hold them"
        return f"every rank's stacks are in {directory / 'stacks.txt'}, and in its log below {directory / 'ranks'}"

    def _was_asked_to_end(self, failure: _Failure) -> bool:
        """Return whether a rank ended by the signal that was passed on, or was killed because it did not."""
        number = self.stop_signal
        return number is not None and failure.code in (-number, 128 + number, -signal.SIGKILL)

    def _explain(self, cause: _Failure) -> None:
        host = self.spec.host_of(cause.rank).name
        how = failure_cause(cause.code, cause.out_of_memory, self.spec.rank_bytes)
        others = sorted({failure.rank for failure in self.failures} - {cause.rank})
        if others:
            self._print_error(f"rank {cause.rank} failed first; ended with it: {', '.join(map(str, others))}")
        self._print_error(f"error: rank {cause.rank} on {host} ended with {how}; its last lines:")
        for line in cause.tail or ["(none)"]:
            self._print_error(line)

    def _print_error(self, text: str) -> None:
        self._print(text, sys.stderr)

    def _print(self, text: str, stream: TextIO, end: str = "\n") -> None:
        """Print; a reader that is gone ends the run (BrokenPipeError), a closed terminal does not."""
        try:
            print(text, end=end, file=stream, flush=True)
        except BrokenPipeError:
            raise
        except OSError:
            return  # SIGHUP follows, which lets the ranks save; their logs hold the rest
