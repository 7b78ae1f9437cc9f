"""Supervision of a start by the launcher process.

It shows what rank 0 prints, and ends all ranks at the first failure:

    WATCHING ------- a stop signal, or a preemption notice -------> STOPPING      ranks save and end by themselves
       |                                                             |    |
       | a rank has failed, a host is lost,        a rank has failed |    |
       | or no rank makes progress                 in another way    |    |
       v                                                             |    |
    COLLECTING <-----------------------------------------------------+    |       agents of other hosts report: the
       |       |                                                          |       failure of one may be the cause
       |       | the time for that has passed; agents stay                | `stop_timeout` has passed
       |       v                                                          |
       |    ENDING_RANKS                                                  |       agents that stay for the next start
       |       |                                                          |       are told to end their ranks
       v       v                                                          |
      OVER  <-------------------------------------------------------------+       connections are closed: other agents
                                                                                  end with them, and ranks with agents

In each state, a start is also over as soon as every agent has ended or waits for the next start, and at a second stop
signal. A stop signal after the first failure changes no state: ranks cannot save without the one that has failed. Only
if the same signal has ended that rank (Ctrl-C reaches the processes of a terminal in any order) does STOPPING follow.

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
from enum import Enum, auto
from types import FrameType
from typing import IO, TextIO

from neox.launch.agent.agent_files import ANSWER_SECONDS, INTERRUPT_RANKS
from neox.launch.agent.lifeline import LOST_SECONDS
from neox.launch.events import Event, decode_event
from neox.launch.orders import end_order
from neox.launch.spec import LaunchSpec
from neox.launch.supervisor.agent_processes import AgentProcesses
from neox.launch.supervisor.outcome import Failure, RunEnd
from neox.launch.supervisor.run_facts import RunFacts, conclude
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


class SupervisionState(Enum):
    """State of a start; see the picture above."""

    WATCHING = auto()
    STOPPING = auto()
    COLLECTING = auto()
    ENDING_RANKS = auto()
    OVER = auto()


class Supervisor:
    """Supervisor of one start of a run.

    Args:
        spec: The start.
        commands: Commands to start; they end when the agents end. Empty if the agents have stayed after a failure.
        signal_agents: Function that sends a signal to all agents; by default to the processes of the commands, which
            are agents on this machine.
        advice: Line that is printed before the explanation of a failure.
        agents: Processes of agents that may stay after a failure; None if they end with this start.
        over_ssh: Whether these processes are ssh connections, whose end means that a host is lost.
        kill_agent: Function that kills an agent that does not respond, given the number of its host. None if agents
            end with the launcher's processes.
        running: Numbers of the hosts whose agents run already, because they have stayed.

    Attributes:
        facts: What is known about the start.
        state: Its state.
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
        self.started_at = time.monotonic()
        self.facts = RunFacts(spec, heard_at=dict.fromkeys(running, self.started_at))
        self.state = SupervisionState.WATCHING
        self.state_ends_at: float | None = None  # a time of the monotonic clock; None while WATCHING
        # Output of the agents
        self.warnings = SharedWarnings(self._print_error, shown_lines())
        self.tails: defaultdict[int, str] = defaultdict(str)  # last lines of failed ranks
        self.hosts_with_stacks: set[int] = set()
        self.disconnected: set[int] = set()  # lost hosts whose connections have ended
        self.interrupted_at = -math.inf  # time of the last Ctrl-C that was passed to the script
        self.ends_at_once = False  # after a second stop signal

    def run(self, environment: Mapping[str, str] | None = None) -> RunEnd:
        """Start every command, follow them to the end, print why the start has failed, and return how it has ended.

        Args:
            environment: Variables of the commands; those of this process if left out.
        """
        previous_handlers = {}
        for signum in _STOP_SIGNALS:
            if signal.getsignal(signum) is not signal.SIG_IGN:  # as SIGHUP is under nohup
                previous_handlers[signum] = signal.signal(signum, self._on_signal)
        try:
            for command in self.commands:
                self.agents.start(command, environment)
            self._watch(self.agents.selector)
        finally:
            self._kill_stuck_agents()
            self.agents.keep(self._staying_hosts())
            for signum, handler in previous_handlers.items():
                signal.signal(signum, handler)
        self.warnings.show_all()
        end, explanation = conclude(self.facts, self.agents.statuses)
        if explanation and self.advice and self.facts.stop_signal is None:
            self._print_error(self.advice)
        for line in explanation:
            self._print_error(line)
        return end

    def _watch(self, selector: selectors.BaseSelector) -> None:
        """Process the output of the agents until the start is over."""
        stop_passed_on = False
        while selector.get_map() and self.state is not SupervisionState.OVER and not self._is_settled():
            for key, _ in selector.select(_POLL_SECONDS):
                if not self._read(key.fileobj):  # type: ignore[arg-type]
                    selector.unregister(key.fileobj)
            self.warnings.show_due()
            if self.facts.stop_signal is not None and not stop_passed_on:
                stop_passed_on = True
                self._pass_on_stop(self.facts.stop_signal)
            self._check_heartbeats()
            self._check_connections()
            self._end_state_when_due()

    # -- states

    def _pass_on_stop(self, signum: int) -> None:
        """Ask all ranks to save and end, unless the start is being ended already."""
        if self.state is not SupervisionState.WATCHING and not self._only_the_signal_has_ended_ranks():
            return
        limit = self.spec.stop_timeout
        reason = "preemption"
        hint = ""
        if self.facts.asked_by_signal:
            reason = signal.Signals(signum).name
            hint = " (a second signal ends them now)"
        self._print_error(
            f"{reason}: the ranks have {limit:.0f} s to save and end, those that do not answer "
            f"{min(ANSWER_SECONDS, limit):.0f} s{hint}"
        )
        self.signal_agents(signum)
        self.state_ends_at = time.monotonic() + limit + _END_SECONDS
        self.state = SupervisionState.STOPPING

    def _only_the_signal_has_ended_ranks(self) -> bool:
        """Return whether reports are collected only because ranks have ended by the stop signal before it came here."""
        facts = self.facts
        has_other_cause = facts.hung or bool(facts.hosts_lost)
        if self.state is not SupervisionState.COLLECTING or has_other_cause:
            return False
        return all(map(facts.is_by_stop_signal, facts.failures))

    def _collect_reports(self, seconds: float) -> None:
        """After a failure, wait some seconds for what other agents report, unless the start is being ended already."""
        if self.state_ends_at is None:
            self.state = SupervisionState.COLLECTING
            self.state_ends_at = time.monotonic() + seconds

    def _end_state_when_due(self) -> None:
        now = time.monotonic()
        if self.ends_at_once:
            self.state = SupervisionState.OVER
        if self.state is SupervisionState.OVER or self.state_ends_at is None or now < self.state_ends_at:
            return
        if self.state is SupervisionState.COLLECTING and self._agents_stay():
            self.state = SupervisionState.ENDING_RANKS
            self.state_ends_at = now + _END_RANKS_SECONDS
            self.agents.order(self.facts.running_hosts, end_order(self.spec))
        else:
            self.state = SupervisionState.OVER

    def _agents_stay(self) -> bool:
        """Return whether agents stay after a failure of this start."""
        return self.spec.warm_module is not None and self.facts.stop_signal is None

    def _is_settled(self) -> bool:
        """Return whether there is nothing more to follow, although agents that wait for the next start still run."""
        if self.spec.warm_module is None or self.facts.running_hosts:
            return False
        if self.facts.hosts_lost:  # other hosts may still report what has happened, until they are told to end
            return self.state is SupervisionState.ENDING_RANKS
        return all(self.facts.hosts_done.values()) or self.over_ssh

    def _staying_hosts(self) -> list[str]:
        """Return the names of the hosts whose agents wait for the next start: those with a failure, and spare ones."""
        if not self._agents_stay():
            return []
        staying = list(self.spec.spares)
        for node, status in self.facts.hosts_done.items():
            if status and node not in self.facts.hosts_lost:
                staying.append(self.spec.hosts[node])
        return [host.name for host in staying if host.name in self.agents.hosts]

    def _on_signal(self, signum: int, _frame: FrameType | None) -> None:
        facts = self.facts
        if signum == signal.SIGINT and self.spec.answers_interrupts and facts.stop_signal is None:
            previous = self.interrupted_at
            self.interrupted_at = time.monotonic()
            if self.interrupted_at - previous > _TWICE_SECONDS:
                self.signal_agents(INTERRUPT_RANKS)
                return
        # A second signal: the user does not want to wait. It may come before the first one is passed on.
        self.ends_at_once = facts.asked_by_signal
        facts.asked_by_signal = True
        if facts.stop_signal is None:
            # Ranks save at SIGTERM; a closed terminal asks for the same.
            facts.stop_signal = signal.SIGTERM if signum == signal.SIGHUP else signum

    # -- hosts that are lost

    def _check_heartbeats(self) -> None:
        """Mark a host as lost if nothing has been heard from it for too long."""
        now = time.monotonic()
        limit = LOST_SECONDS if self.kill_agent is None else _STUCK_SECONDS
        for node in range(len(self.spec.hosts)):
            if node in self.facts.hosts_done:
                continue
            heard_at = self.facts.heard_at.get(node)
            if heard_at is not None and now - heard_at > limit:
                self._lose(node, f"nothing heard for {limit:.0f} s")
            elif heard_at is None and self.kill_agent is not None and now - self.started_at > _FIRST_EVENT_SECONDS:
                self._lose(node, f"its agent has not started within {_FIRST_EVENT_SECONDS:.0f} s")

    def _check_connections(self) -> None:
        """Mark a host as lost if its ssh connection has ended without a report of the agent."""
        if not self.over_ssh:
            return
        for node, host in enumerate(self.spec.hosts):
            if node in self.facts.hosts_done or node in self.facts.hosts_lost:
                continue  # a lost one's connection was ended by this process
            status = self.agents.connection_end(host.name)
            if status is not None:
                self.disconnected.add(node)
                self._lose(node, f"ssh exited with exit code {status}")

    def _lose(self, node: int, how: str) -> None:
        if node in self.facts.hosts_lost:
            return
        self.facts.hosts_lost[node] = how
        if self.over_ssh:  # its agent, if it still runs, ends without a connection
            self.agents.terminate(self.spec.hosts[node].name)
        self._collect_reports(_KNOWN_CAUSE_SECONDS if self.over_ssh else _WINDOW_SECONDS)

    def _kill_stuck_agents(self) -> None:
        """Kill the agents that are silent at the end. A stopped one cannot notice that its connection ends.

        Those whose connection has ended are left out: their hosts are probably gone.
        """
        if self.kill_agent is None:
            return
        now = time.monotonic()
        for node, heard_at in self.facts.heard_at.items():
            is_silent = now - heard_at > _SILENT_SECONDS
            if is_silent and node not in self.facts.hosts_done and node not in self.disconnected:
                self.kill_agent(node)

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
        if event is not None:
            self._take_event(event)
            return
        connection_ended = _CONNECTION_ENDED.match(line)
        if connection_ended:
            for node, host in enumerate(self.spec.hosts):
                if host.name == connection_ended["host"] and node not in self.facts.hosts_done:
                    self.disconnected.add(node)
                    self._lose(node, connection_ended["how"])
        elif line.strip():
            host_name = self.agents.host_of(descriptor) if self.over_ssh else None
            self._print_error(line if host_name is None else f"{host_name}: {line}")

    def _take_event(self, event: Event) -> None:
        """Process an event of an agent. `neox.launch.events` has a table of them."""
        kind = event["kind"]
        if kind == "waiting":  # from an agent without ranks: before this start, or on a spare host
            return
        facts = self.facts
        node = event["node"]
        facts.heard_at[node] = time.monotonic()
        if event.get("step") is not None:
            facts.step = event["step"]
        if kind == "line":
            self._show_line(event)
        elif kind == "tail":
            self.tails[event["rank"]] += event["text"] + _line_end(event)
        elif kind == "exit" and event["code"] != 0:
            self._take_failure(Failure.of_event(event, self.tails[event["rank"]]))
        elif kind == "hang":
            self._take_hang(event)
        elif kind == "stacks" and facts.hung:  # all stacks of this host have been sent
            self.hosts_with_stacks.add(node)
            if len(self.hosts_with_stacks) == len(self.spec.hosts):
                self.state_ends_at = time.monotonic() + _POLL_SECONDS
        elif kind == "preempted":
            host = self.spec.hosts[node].name
            facts.preempted[host] = f"{host} is about to be preempted: {event['notice']}"
            self._print_error(facts.preempted[host])
            if facts.stop_signal is None and not facts.failures:
                facts.stop_signal = signal.SIGTERM
        elif kind == "done":
            facts.hosts_done[node] = event["code"]

    def _show_line(self, event: Event) -> None:
        if event["stream"] == "out":
            self._print(event["text"], sys.stdout, _line_end(event))
        elif self.warnings.take(event):
            self._print(event["text"], sys.stderr, _line_end(event))
        is_from_agent = event["rank"] < 0
        if self.facts.hung and is_from_agent:  # it is about the stacks of ranks
            self.facts.stacks.append(event["text"] + _line_end(event))

    def _take_failure(self, failure: Failure) -> None:
        self.facts.failures.append(failure)
        if self.facts.stop_signal is None:
            is_cause_itself = self.over_ssh and failure.code == -signal.SIGKILL
            self._collect_reports(_KNOWN_CAUSE_SECONDS if is_cause_itself else _WINDOW_SECONDS)
        elif not self.facts.is_by_stop_signal(failure):  # the other ranks cannot save without this one
            if self.state in (SupervisionState.WATCHING, SupervisionState.STOPPING):
                self.state = SupervisionState.COLLECTING
            self.state_ends_at = min(self.state_ends_at or math.inf, time.monotonic() + _WINDOW_SECONDS)

    def _take_hang(self, event: Event) -> None:
        """Ask every host for its ranks' stacks, when the first one reports that no rank makes progress."""
        if event.get("stopped") is not None:
            self.facts.stopped_rank = event["stopped"]
        if self.facts.hung:
            return
        self.facts.hung = True
        seconds = event["seconds"]
        self._print_error(f"no rank made progress for {seconds:.0f} s (hang_timeout): every rank's stacks follow")
        self.signal_agents(signal.SIGUSR1)
        self._collect_reports(_HANG_SECONDS)

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
