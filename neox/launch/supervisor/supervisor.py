"""Supervision of a run by the launcher process.

It starts the agents, shows what rank 0 prints, and ends all ranks at the first failure.

The run's exit status is that of the rank that failed first (a signal is 128 + its number). The last output is that
rank's host, number and traceback. No process of the run is left.
"""

from __future__ import annotations

import math
import os
import re
import selectors
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, TextIO

from neox.files import write_text
from neox.launch.agent.agent_files import ANSWER_SECONDS, INTERRUPT_RANKS
from neox.launch.events import Event, decode_event
from neox.launch.failures import EXIT_HANG
from neox.launch.lifeline import LOST_SECONDS, exit_status
from neox.launch.orders import end_order
from neox.launch.spec import LaunchSpec
from neox.launch.supervisor.agent_processes import AgentProcesses
from neox.launch.supervisor.outcome import EndKind, Failure, RunEnd, end_by_failure, explain, find_cause
from neox.launch.supervisor.shared_warnings import SharedWarnings
from neox.log import shown_lines

_POLL_SECONDS = 0.1
_READ_BYTES = 65536
_WINDOW_SECONDS = 1.5  # after the first failure, for the reports of other hosts, one of which may be the cause
_KNOWN_CAUSE_SECONDS = 0.5  # the same after the end of an ssh connection or a SIGKILL, which are causes themselves
_END_RANKS_SECONDS = 3.0  # in which agents that may stay must have ended their ranks
_END_SECONDS = 4.0
_HANG_SECONDS = 6.0
_TWICE_SECONDS = 1.0  # between two Ctrl-C that end a run whose script handles single ones
# Silence after which an agent behind ssh is killed. ssh notices a lost network earlier; then no kill is possible.
_STUCK_SECONDS = LOST_SECONDS + 5.0
_SILENT_SECONDS = 2.0  # an agent writes every second
_FIRST_EVENT_SECONDS = 300.0  # in which an agent must have started behind ssh
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_CONNECTION_ENDED = re.compile(r"pdsh@\S+: (?P<host>\S+): (?P<how>ssh (?:exited with exit code|killed by signal) \d+)")

SignalAgents = Callable[[int], None]  # on all hosts


class Supervisor:
    """Supervisor of one run.

    Args:
        spec: The run.
        commands: Commands to start; they end when the agents end. Empty if the agents have stayed after a failure.
        signal_agents: Function that sends a signal to all agents; by default to the processes of the commands, which
            are agents on this machine.
        advice: Line that is printed before the explanation of a failure.
        agents: Processes of agents that may stay after a failure; None if they end with this run.
        over_ssh: Whether these processes are ssh connections, whose end means that a host is lost.
        kill_agent: Function that kills an agent that does not respond, given the number of its host. None if agents
            end with the launcher's processes.
        running: Numbers of the hosts whose agents run already, because they have stayed.
    """

    def __init__(
        self,
        spec: LaunchSpec,
        commands: Sequence[Sequence[str]],
        signal_agents: SignalAgents | None = None,
        advice: str = "",
        agents: AgentProcesses | None = None,
        *,
        over_ssh: bool = False,
        kill_agent: Callable[[int], None] | None = None,
        running: Iterable[int] = (),
    ) -> None:
        self.spec = spec
        self.advice = advice
        self.over_ssh = over_ssh
        self.kill_agent = kill_agent
        self.commands = commands
        self.agents = agents or AgentProcesses()
        self.signal_agents = signal_agents or self.agents.signal
        # Output of the agents
        self.warnings = SharedWarnings(self._print_error, shown_lines())
        self.tails: defaultdict[int, str] = defaultdict(str)  # last lines of failed ranks
        self.stacks: list[str] = []
        # What is known about the run. Hosts are numbered as in the specification.
        self.failures: list[Failure] = []  # in the order of their reports
        self.hosts_done: dict[int, int] = {}  # exit status of the agent
        self.hosts_lost: dict[int, str] = {}  # what happened to the connection
        self.started_at = time.monotonic()
        self.heard_at: dict[int, float] = dict.fromkeys(running, self.started_at)
        self.disconnected: set[int] = set()  # lost hosts whose connections have ended
        self.hosts_with_stacks: set[int] = set()
        self.hung = False
        self.stopped_rank: int | None = None  # of a run that hung
        self.step: int | None = None  # number of completed steps, as far as agents have reported it
        self.stop_signal: int | None = None  # as passed on to the ranks
        self.preempted: dict[str, str] = {}  # hosts that are about to be preempted, with the notices
        self.asked_by_signal = False
        self.interrupted_at = -math.inf  # time of the last Ctrl-C that was passed to the script
        self.ranks_ended = False  # whether the agents that may stay have been told to end their ranks
        self.end_at: float | None = None  # time at which the run is ended, whoever is still running

    def run(self, environment: Mapping[str, str] | None = None) -> RunEnd:
        """Start every command, follow them to the end, print why the run has failed, and return how it has ended.

        Args:
            environment: Variables of the commands; those of this process if left out.
        """
        previous = {}
        for number in _STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as SIGHUP is under nohup
                previous[number] = signal.signal(number, self._on_signal)
        try:
            for command in self.commands:
                self.agents.start(command, environment)
            self._watch(self.agents.selector)
        finally:
            self._kill_stuck_agents()
            self.agents.keep(self._staying_hosts())
            for number, handler in previous.items():
                signal.signal(number, handler)
        return self._conclude()

    # -- watching

    def _watch(self, selector: selectors.BaseSelector) -> None:
        """Process the output of the agents until all outputs have ended, or the run must end."""
        passed_on = False
        while selector.get_map() and not self._is_settled():
            for key, _ in selector.select(_POLL_SECONDS):
                if not self._read(key.fileobj):  # type: ignore[arg-type]
                    selector.unregister(key.fileobj)
            if self.stop_signal is not None and not passed_on:
                passed_on = True
                self._pass_on_stop(self.stop_signal)
            self.warnings.show_due()
            now = time.monotonic()
            self._check_heartbeats(now)
            self._check_connections()
            if self.end_at is not None and now >= self.end_at and not self._end_ranks_first(now):
                return

    def _pass_on_stop(self, signum: int) -> None:
        limit = self.spec.stop_timeout
        reason = "preemption"
        hint = ""
        if self.asked_by_signal:
            reason = signal.Signals(signum).name
            hint = " (a second signal ends them now)"
        self._print_error(
            f"{reason}: the ranks have {limit:.0f} s to save and end, those that do not answer "
            f"{min(ANSWER_SECONDS, limit):.0f} s{hint}"
        )
        self.signal_agents(signum)
        self.end_at = time.monotonic() + limit + _END_SECONDS

    def _check_heartbeats(self, now: float) -> None:
        """Mark a host as lost if nothing has been heard from it for too long."""
        limit = LOST_SECONDS if self.kill_agent is None else _STUCK_SECONDS
        for node in range(len(self.spec.hosts)):
            heard_at = self.heard_at.get(node)
            if node in self.hosts_done:
                continue
            if heard_at is not None and now - heard_at > limit:
                self._lose(node, f"nothing heard for {limit:.0f} s")
            elif heard_at is None and self.kill_agent is not None and now - self.started_at > _FIRST_EVENT_SECONDS:
                self._lose(node, f"its agent has not started within {_FIRST_EVENT_SECONDS:.0f} s")

    def _kill_stuck_agents(self) -> None:
        """Kill the agents that are silent at the end of the run. A stopped one cannot notice that its connection ends.

        Those whose connection has ended are left out: their hosts are probably gone.
        """
        if self.kill_agent is None:
            return
        now = time.monotonic()
        for node, heard_at in self.heard_at.items():
            is_silent = now - heard_at > _SILENT_SECONDS
            if is_silent and node not in self.hosts_done and node not in self.disconnected:
                self.kill_agent(node)

    def _check_connections(self) -> None:
        """Mark a host as lost if its ssh connection has ended without a report of the agent."""
        if not self.over_ssh:
            return
        for node, host in enumerate(self.spec.hosts):
            status = self.agents.connection_end(host.name)
            was_lost_before = node in self.hosts_lost  # then this process has ended the connection
            if status is not None and node not in self.hosts_done and not was_lost_before:
                self.disconnected.add(node)
                self._lose(node, f"ssh exited with exit code {status}")

    def _lose(self, node: int, how: str) -> None:
        if node not in self.hosts_lost:
            self.hosts_lost[node] = how
            if self.over_ssh:  # its agent, if it still runs, ends without a connection
                self.agents.terminate(self.spec.hosts[node].name)
            self._end_in(_KNOWN_CAUSE_SECONDS if self.over_ssh else _WINDOW_SECONDS)

    def _end_ranks_first(self, now: float) -> bool:
        """Before the run ends, tell the agents that may stay to end their ranks. Return whether to wait for them."""
        if not self._may_stay() or self.ranks_ended:
            return False
        self.ranks_ended = True
        self.end_at = now + _END_RANKS_SECONDS
        self.agents.order(self._running_hosts(), end_order(self.spec))
        return True

    def _running_hosts(self) -> list[str]:
        """Return the names of the hosts whose ranks are still running, as far as is known."""
        gone = {*self.hosts_done, *self.hosts_lost}
        return [host.name for node, host in enumerate(self.spec.hosts) if node not in gone]

    def _end_in(self, seconds: float) -> None:
        """End the run after some seconds, unless a time is set already."""
        if self.end_at is None:
            self.end_at = time.monotonic() + seconds

    # -- output of the agents

    def _read(self, pipe: IO[bytes]) -> bool:
        """Process the available output of a pipe. Return False if the output has ended."""
        try:
            data = os.read(pipe.fileno(), _READ_BYTES)
        except BlockingIOError:
            return True
        buffer = self.agents.buffers[pipe.fileno()]
        lines = buffer.feed(data) if data else buffer.flush()
        for line in lines:
            self._take_line(line, pipe.fileno())
        return bool(data)

    def _take_line(self, line: str, descriptor: int) -> None:
        """Process a line: an event, or text for people. pdsh writes `host: ` in front of every line, ssh does not."""
        event = decode_event(line) or decode_event(line.partition(": ")[2])
        connection_ended = _CONNECTION_ENDED.match(line)
        if event is not None:
            self._take_event(event)
        elif connection_ended:
            self._take_connection_end(connection_ended["host"], connection_ended["how"])
        elif line.strip():
            host = self.agents.host_of(descriptor) if self.over_ssh else None
            self._print_error(line if host is None else f"{host}: {line}")

    def _take_connection_end(self, host: str, how: str) -> None:
        """Process pdsh's message that ssh to a host has ended, unless the agent there has reported its own end."""
        for node, known in enumerate(self.spec.hosts):
            if known.name == host and node not in self.hosts_done:
                self.disconnected.add(node)
                self._lose(node, how)

    def _take_event(self, event: Event) -> None:
        if event["kind"] == "waiting":  # from an agent without ranks: before this start, or on a spare host
            return
        self.heard_at[event["node"]] = time.monotonic()
        if event.get("step") is not None:
            self.step = event["step"]
        kind = event["kind"]
        if kind == "line":
            self._take_text(event)
        elif kind == "tail":
            self.tails[event["rank"]] += event["text"] + _line_end(event)
        elif kind == "exit" and event["code"] != 0:
            self._take_failure(event)
        elif kind == "hang":
            self._take_hang(event)
        elif kind == "stacks":
            self._take_stacks_end(event["node"])
        elif kind == "preempted":
            self._take_preemption(event)
        elif kind == "done":
            self.hosts_done[event["node"]] = event["code"]

    def _take_text(self, event: Event) -> None:
        if event["stream"] == "out":
            self._print(event["text"], sys.stdout, _line_end(event))
        elif self.warnings.take(event):
            self._print(event["text"], sys.stderr, _line_end(event))
        is_from_agent = event["rank"] < 0
        if self.hung and is_from_agent:  # a part of the ranks' stacks
            self.stacks.append(event["text"] + _line_end(event))

    def _take_failure(self, event: Event) -> None:
        failure = Failure.of_event(event, self.tails[event["rank"]])
        self.failures.append(failure)
        if self.stop_signal is None:
            needs_no_reports = self.over_ssh and failure.code == -signal.SIGKILL
            self._end_in(_KNOWN_CAUSE_SECONDS if needs_no_reports else _WINDOW_SECONDS)
        elif not _ended_by(failure, self.stop_signal):  # the other ranks cannot save without this one
            self.end_at = min(self.end_at or math.inf, time.monotonic() + _WINDOW_SECONDS)

    def _take_hang(self, event: Event) -> None:
        if event.get("stopped") is not None:
            self.stopped_rank = event["stopped"]
        if self.hung:  # another host has reported it
            return
        self.hung = True
        seconds = event["seconds"]
        self._print_error(f"no rank made progress for {seconds:.0f} s (hang_timeout): every rank's stacks follow")
        self.signal_agents(signal.SIGUSR1)
        self._end_in(_HANG_SECONDS)

    def _take_preemption(self, event: Event) -> None:
        """Ask all ranks to save and end, because a host is about to be preempted."""
        host = self.spec.hosts[event["node"]].name
        self.preempted[host] = f"{host} is about to be preempted: {event['notice']}"
        self._print_error(self.preempted[host])
        if self.stop_signal is None and not self.failures:
            self.stop_signal = signal.SIGTERM

    def _take_stacks_end(self, node: int) -> None:
        """Record that a host has sent all its stacks. End a hung run when every host has."""
        if not self.hung:
            return
        self.hosts_with_stacks.add(node)
        if len(self.hosts_with_stacks) == len(self.spec.hosts):
            self.end_at = time.monotonic() + _POLL_SECONDS

    # -- ending

    def _on_signal(self, number: int, _frame: Any) -> None:
        if number == signal.SIGINT and self.spec.answers_interrupts and self.stop_signal is None:
            previous = self.interrupted_at
            self.interrupted_at = time.monotonic()
            if self.interrupted_at - previous > _TWICE_SECONDS:
                self.signal_agents(INTERRUPT_RANKS)
                return
        if self.asked_by_signal:  # the second signal: the user does not want to wait
            self.end_at = time.monotonic()
        self.asked_by_signal = True
        if self.stop_signal is None:
            # Ranks save at SIGTERM; a closed terminal asks for the same.
            self.stop_signal = signal.SIGTERM if number == signal.SIGHUP else number

    def _may_stay(self) -> bool:
        """Return whether agents stay after a failure of this start."""
        return self.spec.warm_module is not None and self.stop_signal is None

    def _is_settled(self) -> bool:
        """Return whether there is nothing more to follow. Agents that wait for the next start may still be running."""
        if self.spec.warm_module is None:
            return False
        if self._running_hosts():
            return False
        if self.hosts_lost:
            return self.ranks_ended  # before that, other hosts may still report what has happened
        return all(self.hosts_done.values()) or self.over_ssh

    def _staying_hosts(self) -> list[str]:
        """Return the names of the hosts whose agents wait for the next start: those with a failure, and spare ones."""
        if not self._may_stay():
            return []
        possible = list(self.spec.spares)
        for node, code in self.hosts_done.items():
            if code and node not in self.hosts_lost:
                possible.append(self.spec.hosts[node])
        return [host.name for host in possible if host.name in self.agents.hosts]

    # -- the result

    def _conclude(self) -> RunEnd:
        """Return how the run has ended, and print why it has failed, with the first failure's traceback last."""
        end = self._explained_end()
        step = self.step if end.step is None else end.step
        return replace(end, step=step, asked=self.asked_by_signal, preempted=tuple(self.preempted))

    def _explained_end(self) -> RunEnd:
        """Print why the run has failed, and return what is known about its end."""
        self.warnings.show_all()
        if self.hung:
            self._print_advice()
            self._print_error(f"ended: the run hung; {self._write_stacks()}")
            return self._end_by_hang()
        cause = self._cause()
        if cause is not None:
            self._print_advice()
            for line in explain(self.spec, cause, self.failures):
                self._print_error(line)
            return end_by_failure(self.spec, exit_status(cause.code), cause, self.failures)
        if self.stop_signal is not None:
            status = self._status_after_stop(self.stop_signal)
            if self.asked_by_signal:
                return RunEnd(EndKind.ASKED, status)
            notices = "; ".join(self.preempted.values())
            return RunEnd(EndKind.PREEMPTED, status, notices, hosts=tuple(self.preempted))
        if len(self.hosts_done) == len(self.spec.hosts):
            return RunEnd(EndKind.FINISHED, max(self.hosts_done.values()))
        self._print_advice()
        return self._conclude_without_report()

    def _print_advice(self) -> None:
        if self.advice and self.stop_signal is None:
            self._print_error(self.advice)

    def _end_by_hang(self) -> RunEnd:
        """Return the end of a run that hung. Name the rank that is stopped by a signal, if there is one."""
        rank = self.stopped_rank
        if rank is None:
            return RunEnd(EndKind.HANG, EXIT_HANG, "no rank made progress")
        host = self.spec.host_of(rank).name
        cause = f"no rank made progress; rank {rank} on {host} is stopped"
        return RunEnd(EndKind.HANG, EXIT_HANG, cause, rank, (host,))

    def _cause(self) -> Failure | None:
        """Return the first failure; None if there is none, or if a signal to this process has caused all of them."""
        failures = [failure for failure in self.failures if not self._was_asked_to_end(failure)]
        cause = find_cause(failures)
        nobody_was_asked = len(failures) == len(self.failures)
        if cause is None and failures and nobody_was_asked:
            return next((failure for failure in failures if not failure.killed), failures[0])
        return cause

    def _was_asked_to_end(self, failure: Failure) -> bool:
        """Return whether a rank ended by the signal that was passed on, or was killed because it did not."""
        if self.stop_signal is None:
            return False
        return failure.code == -signal.SIGKILL or _ended_by(failure, self.stop_signal)

    def _status_after_stop(self, signum: int) -> int:
        """Return the exit status of a run after a stop signal: that of the agents, or 128 + signal after a failure."""
        if not self.failures and len(self.hosts_done) == len(self.spec.hosts):
            return max(self.hosts_done.values())
        return 128 + signum

    def _conclude_without_report(self) -> RunEnd:
        """Name the hosts that were lost, or that have ended without a report, and return the end of the run."""
        if self.hosts_lost:
            lost = []
            for node, how in self.hosts_lost.items():
                lost.append(f"lost {self.spec.hosts[node].name} ({how})")
                self._print_error(f"error: {lost[-1]}; the run was ended on every host")
            names = tuple(self.spec.hosts[node].name for node in self.hosts_lost)
            return RunEnd(EndKind.HOST, 1, "; ".join(lost), hosts=names)
        missing = [host.name for node, host in enumerate(self.spec.hosts) if node not in self.hosts_done]
        self._print_error(f"error: the run ended on {', '.join(missing)} without a report about its ranks")
        status = max([1, *self.agents.statuses])
        if not self.heard_at:
            return RunEnd(EndKind.NO_AGENT, status, f"no agent has started on {', '.join(missing)}")
        cause = f"{', '.join(missing)} ended without a report about its ranks"
        return RunEnd(EndKind.SILENT, status, cause, hosts=tuple(missing))

    def _write_stacks(self) -> str:
        """Write every rank's stacks to one file of the run directory, and return where they are."""
        directory = Path(self.spec.run_directory)
        logs = directory / "ranks"
        try:
            write_text(directory / "stacks.txt", self.stacks)
        except OSError as error:
            return f"stacks.txt cannot be written ({error.strerror}); the logs in {logs} contain them"
        return f"every rank's stacks are in {directory / 'stacks.txt'}, and in its log below {logs}"

    # -- printing

    def _print_error(self, text: str) -> None:
        self._print(text, sys.stderr)

    def _print(self, text: str, stream: TextIO, end: str = "\n") -> None:
        """Print a text. A reader that is gone ends the run (BrokenPipeError); a closed terminal does not."""
        try:
            print(text, end=end, file=stream, flush=True)
        except BrokenPipeError:
            raise
        except OSError:
            return  # SIGHUP follows, at which the ranks save; their logs contain the rest


def _line_end(event: Event) -> str:
    return "" if event["more"] else "\n"


def _ended_by(failure: Failure, signum: int) -> bool:
    """Return whether a rank ended by a signal, or with the exit status that stands for it."""
    return failure.code in (-signum, 128 + signum)
