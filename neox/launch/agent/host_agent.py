"""Agent of one host: starts the host's ranks, monitors them, and ends them together.

`python -m neox.launch.agent.host_agent SPEC --node_rank N [--lifeline] [--plain]`

    HostAgent           the process: signals, orders of the launcher, secrets, warm processes
      StartOnHost       one start of the run: the loop that follows the ranks, and what makes it end them
        RankEnding      states, deadlines and reasons of that end, with a picture (`rank_ending`)
        RankGroup       the ranks' processes and their watchdog (`rank_group`)
          RankProcess   one rank: its log, its output as events, its stacks (`rank_process`)

Its standard output carries events (`neox.launch.events`) to the launcher. It ends its ranks in these cases:

- a rank has failed;
- SIGTERM or SIGINT arrives, which it passes on to the ranks. Ranks that acknowledge it (`acknowledge_stop`) or are
  saving get `stop_timeout` seconds; the others are killed after five seconds;
- with `--lifeline`, the launcher or the ssh connection has ended: standard input ends, output cannot be written, or
  the network is cut;
- no rank has made progress for `hang_timeout` seconds;
- the launcher orders it, or the watchdog process has ended.

On SIGUSR1 it shows every rank's stacks.

The agent of a run that may be started again (`warm_module`) takes orders on its standard input (`neox.launch.orders`).
It stays after a failure, with its warm processes, until the launcher ends it or orders the next start. On a spare host
it waits from the beginning.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import NoReturn

from neox.errors import LaunchError, run_script
from neox.launch.agent.agent_files import (
    INTERRUPT_RANKS,
    LAUNCHER_VARIABLE,
    STOP_RANKS,
    RankActivity,
    Silence,
    agent_directory,
    create_agent_directory,
    take_secrets,
    write_pids,
)
from neox.launch.agent.lifeline import follow_launcher, is_unanswered, ssh_ports
from neox.launch.agent.plain_output import PlainOutput
from neox.launch.agent.preemption import PreemptionSource, PreemptionWatch
from neox.launch.agent.rank_ending import EndReason, EndState, RankEnding, RanksToKill
from neox.launch.agent.rank_group import RankGroup, host_variables
from neox.launch.agent.rank_process import RankProcess
from neox.launch.agent.warm_ranks import WarmRanks
from neox.launch.commands import warm_command
from neox.launch.environment import remove_stale_locks
from neox.launch.events import Event, encode_event, text_events
from neox.launch.failures import EXIT_HANG
from neox.launch.hosts.vendors import torch_problem, variables_of_rank
from neox.launch.orders import Orders
from neox.launch.processes import exit_status
from neox.launch.run_lock import lock_directories
from neox.launch.spec import LaunchSpec

_HEARTBEAT_SECONDS = 1.0
_AFTER_FAILURE_SECONDS = 0.7  # grace period in which the other ranks can log their errors
_AFTER_KILL_SECONDS = 0.1  # the same after a SIGKILL, which needs no explanation by the other ranks
_STACK_SECONDS = 1.5  # in which ranks write their stacks


class LauncherGoneError(Exception):
    """Nothing reads the events of this agent any more."""


@dataclass
class SignalRequests:
    """What signals have asked for. Their handlers only set fields; the agent's loop acts on them.

    Attributes:
        stop: The signal to pass on to the ranks, which asks them to save and end.
        stacks: Whether the ranks' stacks are to be shown.
        interrupt: Whether the ranks are to get SIGINT, which their script handles.
    """

    stop: int | None = None
    stacks: bool = False
    interrupt: bool = False

    def forget_for_ranks(self) -> None:
        """Forget what was asked for the ranks of an earlier start, which have ended. A stop holds for all starts."""
        self.stacks = False
        self.interrupt = False

    def install_handlers(self) -> None:
        """Handle the signals of this process. Only the main thread may call this."""
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, STOP_RANKS):
            signal.signal(signum, self._on_stop)
        signal.signal(signal.SIGUSR1, self._on_stacks)
        signal.signal(INTERRUPT_RANKS, self._on_interrupt)

    def _on_stop(self, signum: int, _frame: FrameType | None) -> None:
        # Ranks save at SIGTERM; a closed terminal asks for the same.
        self.stop = signal.SIGTERM if signum in (signal.SIGHUP, STOP_RANKS) else signum

    def _on_stacks(self, _signum: int, _frame: FrameType | None) -> None:
        self.stacks = True

    def _on_interrupt(self, _signum: int, _frame: FrameType | None) -> None:
        self.interrupt = True


def main() -> int:
    """Run the agent of one host."""
    program = "python -m neox.launch.agent.host_agent"
    parser = argparse.ArgumentParser(prog=program, description="Start and watch one host's ranks.")
    parser.add_argument("spec", help="the run, as base64")
    parser.add_argument("--node_rank", required=True, help="number of this host, from 0; `auto` asks slurm or mpirun")
    parser.add_argument("--lifeline", action="store_true", help="end when standard input ends")
    parser.add_argument("--plain", action="store_true", help="print for people: no launcher process reads events")
    arguments = parser.parse_args()
    spec = LaunchSpec.decode(arguments.spec)
    node_rank = _node_rank(arguments.node_rank)
    try:
        return HostAgent(spec, node_rank, lifeline=arguments.lifeline, plain=arguments.plain).run()
    except OSError as error:  # usually about the run's directories
        raise LaunchError(f"ranks cannot be started on {spec.hosts_with_agents[node_rank].name}: {error}") from None


def _node_rank(text: str) -> int:
    """Return a host's number; srun and mpirun, which start one agent per host, set it in the environment."""
    if text != "auto":
        return int(text)
    for name in ("SLURM_NODEID", "OMPI_COMM_WORLD_RANK", "PMIX_RANK"):
        if name in os.environ:
            return int(os.environ[name])
    raise LaunchError("neither SLURM_NODEID nor OMPI_COMM_WORLD_RANK is set: was this started by srun or mpirun?")


class HostAgent:
    """The process of the agent: all starts of a run on this host, one after another.

    Args:
        spec: The first start.
        node_rank: Number of this host in it, from 0. Spare hosts follow those with ranks.
        lifeline: Whether to take orders from standard input, and to end with it.
        plain: Whether to print for people, because no launcher process reads the events.
    """

    def __init__(self, spec: LaunchSpec, node_rank: int, *, lifeline: bool, plain: bool) -> None:
        self.spec = spec
        self.node_rank = node_rank
        self.lifeline = lifeline
        self.plain_output = PlainOutput(spec) if plain else None
        self.requests = SignalRequests()
        self.orders = Orders()
        self.secrets: dict[str, str] = {}
        self.start: StartOnHost | None = None  # the current one
        command = warm_command(spec)
        self.warm_ranks: WarmRanks | None = None
        if command is not None and lifeline:
            self.warm_ranks = WarmRanks(command)

    def run(self) -> int:
        """Run one start after another, as long as the launcher orders any. Return the status of the last."""
        self.requests.install_handlers()
        self.secrets = take_secrets(self.spec.run_id, self.node_rank)
        if self.lifeline:
            self._follow_launcher()
        with contextlib.ExitStack() as locks:
            if self.plain_output is not None and self.node_rank == 0:  # no launcher process holds these locks
                lock_directories(self.spec.reserved, Path(self.spec.script).name, locks)
            try:
                return self._run_starts()
            except LauncherGoneError:
                self._end_at_once()
            finally:
                if self.warm_ranks is not None:
                    self.warm_ranks.close()

    def _run_starts(self) -> int:
        while True:
            is_spare = self.node_rank >= len(self.spec.hosts)  # it has no ranks in this start
            status = 0
            if is_spare:
                self._prepare_spare_host()
            else:
                self.start = StartOnHost(
                    self.spec,
                    self.node_rank,
                    self.tell,
                    self.requests,
                    self.orders,
                    has_launcher=self.plain_output is None,
                )
                status = self.start.run(self.secrets, self.warm_ranks)
            if self.warm_ranks is None or (status == 0 and not is_spare):
                return status
            spec = self._wait_for_next_start()
            node_rank = None if spec is None else spec.node_rank_of(self.spec.hosts_with_agents[self.node_rank].name)
            if spec is None or node_rank is None:
                return status
            self.spec = spec
            self.node_rank = node_rank

    def _wait_for_next_start(self) -> LaunchSpec | None:
        """Wait for the next start, after a failure or on a spare host. Return None if a signal ends the agent."""
        while self.requests.stop is None:
            spec = self.orders.next_start(_HEARTBEAT_SECONDS)
            if spec is not None:
                self.requests.forget_for_ranks()
                return spec
            self.tell({"kind": "waiting"})  # a lost network is only noticed by writing
        return None

    def _prepare_spare_host(self) -> None:
        """Start warm processes, to replace a host with as many slots as the first host has."""
        assert self.warm_ranks is not None
        spare = self.spec.hosts_with_agents[self.node_rank]
        host = replace(spare, slots=spare.slots[: len(self.spec.hosts[0].slots)])
        progress_file = agent_directory(self.spec.run_id, self.node_rank) / "progress"
        environment = host_variables(self.spec, self.node_rank, host, self.secrets, progress_file)
        for local_rank in range(len(host.slots)):
            self.warm_ranks.prepare(local_rank, variables_of_rank(environment, local_rank), self.spec.directory)

    # -- the launcher

    def tell(self, event: Event) -> None:
        """Send an event to the launcher.

        Raises:
            LauncherGoneError: Nothing reads it any more.
        """
        try:
            if self.plain_output is not None:
                self.plain_output.take(event)
                return
            sys.stdout.write(encode_event({**event, "node": self.node_rank}) + "\n")
            sys.stdout.flush()
        except OSError:
            raise LauncherGoneError from None

    def _follow_launcher(self) -> None:
        """End the agent and its ranks when the launcher, or the ssh connection to it, has ended."""
        ports = ssh_ports(os.environ)
        follow_launcher(
            sys.stdin.fileno(),
            self._end_at_once,
            lambda: ports is not None and is_unanswered(ports),
            on_input=self.orders.feed,
        )

    def _end_at_once(self) -> NoReturn:
        """Kill everything and exit, because the launcher is gone. A thread may call this while the loop is blocked."""
        if self.warm_ranks is not None:
            self.warm_ranks.close()
        if self.start is not None:
            self.start.clean_up()
        os._exit(1)


class StartOnHost:
    """One start of a run on this host.

    Args:
        spec: The start.
        node_rank: Number of this host.
        tell: Function that sends an event to the launcher.
        requests: Requests by signals.
        orders: Orders of the launcher.
        has_launcher: Whether a launcher process reads the events.
    """

    def __init__(
        self,
        spec: LaunchSpec,
        node_rank: int,
        tell: Callable[[Event], None],
        requests: SignalRequests,
        orders: Orders,
        *,
        has_launcher: bool = True,
    ) -> None:
        self.spec = spec
        self.node_rank = node_rank
        self.host = spec.hosts[node_rank]
        self.tell = tell
        self.requests = requests
        self.orders = orders
        self.has_launcher = has_launcher
        self.directory = agent_directory(spec.run_id, node_rank)
        self.activity = RankActivity(self.directory / "progress", spec.log_directory(self.host))
        self.silence = Silence(self.activity)
        self.ranks = RankGroup(self._pass_on)
        self.ending = RankEnding()
        self.status = 0  # exit status of the first failure
        source = PreemptionSource(spec.preemption_command, spec.preemption_file, spec.preemption_seconds)
        guard = (self.ranks.protect, self.ranks.unprotect)
        self.preemption = PreemptionWatch(source, {**os.environ, **spec.environment}, guard)
        self.preemption_reported = False
        # While ranks are writing their stacks: the sizes that their logs had before, and when the stacks are shown.
        self.log_sizes: list[int] | None = None
        self.stacks_at = 0.0

    def run(self, secrets: Mapping[str, str], warm_ranks: WarmRanks | None) -> int:
        """Start the ranks and follow them until the last has ended.

        Args:
            secrets: Secret variables of the ranks.
            warm_ranks: Processes that can become ranks; None if this run has none.

        Returns:
            The exit status of the rank that failed first, or 0.

        Raises:
            LauncherGoneError: Nothing reads this agent's events any more. All ranks have been killed.
            LaunchError: The installed torch cannot use this host's accelerators.
        """
        self.activity.log_dir.mkdir(parents=True, exist_ok=True)
        create_agent_directory(self.spec.run_id, self.node_rank)
        try:
            for lock in remove_stale_locks():
                self._print_line(f"{self.host.name}: removed {lock}, left by a build whose process has ended")
            self.tell({"kind": "node", "host": self.host.name, "pid": os.getpid()})
            environment = host_variables(self.spec, self.node_rank, self.host, secrets, self.activity.file)
            environment[LAUNCHER_VARIABLE] = "1" if self.has_launcher else ""
            problem = torch_problem(environment)
            if problem is not None:  # under slurm and mpirun nobody else has asked this host
                raise LaunchError(f"{self.host.name} has {problem}")
            self.ranks.start(self.spec, self.node_rank, environment, warm_ranks)
            pids = {"agent": os.getpid(), **{str(rank.rank): rank.pid for rank in self.ranks.ranks}}
            write_pids(self.activity.log_dir, pids)
            self.preemption.start()
            self.follow_ranks(warm_ranks)
        finally:
            self.preemption.stop()
            self.clean_up()
        self.tell({"kind": "done", "code": self.status})
        return self.status

    def clean_up(self) -> None:
        """Kill what is left of the ranks, and remove the agent's directory."""
        self.ranks.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def follow_ranks(self, warm_ranks: WarmRanks | None = None) -> None:
        """Read what the ranks print, and look for every reason to end them, until all have ended."""
        last_heartbeat = time.monotonic()
        while self.ranks.are_running():
            for rank in self.ranks.read_output():
                self._take_end(rank)
            self.activity.update()
            if time.monotonic() - last_heartbeat >= _HEARTBEAT_SECONDS:
                last_heartbeat = time.monotonic()
                self._send_heartbeat(warm_ranks)
            self._act_on_requests()
            if self.log_sizes is not None and time.monotonic() >= self.stacks_at:
                self._show_stacks(self.log_sizes)
            if self.ranks.has_lost_watchdog() and self.ending.state is EndState.RUNNING:
                self._print_line(f"the watchdog process on {self.host.name} has ended: the run is ended")
                self._end_ranks(EndReason.NO_WATCHDOG, status=1)
            self.check_progress()
            self._kill_what_is_due()
        if self.log_sizes is not None:
            self._show_stacks(self.log_sizes)

    # -- reasons to end the ranks

    def _take_end(self, rank: RankProcess) -> None:
        """Record that a rank has ended. If it has failed, the others are killed soon: they wait for it."""
        if not rank.code:
            return
        if self.ending.is_answer_to_stop(rank.code):
            self.status = self.status or exit_status(rank.code)
            return
        grace_period = _AFTER_KILL_SECONDS if rank.code == -signal.SIGKILL else _AFTER_FAILURE_SECONDS
        self._end_ranks(EndReason.RANK_FAILED, exit_status(rank.code), grace_period)

    def _act_on_requests(self) -> None:
        """Act on what signals, the launcher and a preemption notice have asked for."""
        if self.orders.say_to_end(self.spec) and self.ending.reason is not EndReason.ORDER:
            self._end_ranks(EndReason.ORDER, status=1)
        if self.requests.stacks:
            self.requests.stacks = False
            self._ask_for_stacks()
        if self.requests.interrupt:
            self.requests.interrupt = False
            self.ranks.signal(signal.SIGINT)
        notice = self.preemption.notice
        if notice is not None and not self.preemption_reported and self.requests.stop is None:
            self.preemption_reported = True
            self.tell({"kind": "preempted", "notice": notice})  # the launcher then asks all ranks to save and end
            if not self.has_launcher:
                self._print_line(f"{self.host.name} is about to be preempted ({notice}): its ranks save and end")
                self.requests.stop = signal.SIGTERM
        if self.requests.stop is not None and self.ending.stop_signal is None:
            self.ending.stop(self.requests.stop, self.activity.answer_seconds(), self.spec.stop_timeout)
            self.ranks.signal(self.requests.stop)

    def check_progress(self) -> None:
        """End the run if no rank of this host has made progress for `hang_timeout` seconds."""
        timeout = self.spec.hang_timeout
        if timeout is None or self.ending.state is not EndState.RUNNING:
            return
        silent_seconds = self.silence.seconds()
        if silent_seconds < timeout:
            return
        self.tell(
            {
                "kind": "hang",
                "seconds": silent_seconds,
                "step": self.activity.step(),
                "stopped": self.ranks.first_stopped(),
            }
        )
        self._ask_for_stacks()
        self._end_ranks(EndReason.NO_PROGRESS, EXIT_HANG, seconds=_STACK_SECONDS)

    def _end_ranks(self, reason: EndReason, status: int, seconds: float = 0.0) -> None:
        """End all ranks of this host after some seconds. The status of the first failure stays."""
        self.status = self.status or status
        self.ending.end(reason, seconds)

    def _kill_what_is_due(self) -> None:
        due = self.ending.ranks_to_kill()
        if due is RanksToKill.ALL:
            self.ranks.kill()
        elif due is RanksToKill.SILENT:
            for rank in self.ranks.ranks:
                if rank.is_running and not self.activity.has_answered(rank.rank):
                    where = f"rank {rank.rank} on {self.host.name}"
                    seconds = self.ending.answer_seconds
                    self._print_line(f"{where} did not answer the signal within {seconds:.0f} s: killed")
                    rank.kill()  # the others then end as well

    # -- what the launcher is told

    def _send_heartbeat(self, warm_ranks: WarmRanks | None) -> None:
        """Tell the launcher that this host is alive. After the first step, start warm processes for the next start."""
        step = self.activity.step()
        self.tell({"kind": "alive", "step": step})
        if warm_ranks is not None and step is not None:  # earlier they would slow the start-up
            for local_rank, variables in enumerate(self.ranks.environments):
                warm_ranks.prepare(local_rank, variables, self.spec.directory)

    def _pass_on(self, event: Event) -> None:
        """Send an event of a rank to the launcher, unless it is not needed there."""
        if event["kind"] == "line" and self.log_sizes is not None:
            return  # stack output of rank 0, which `_show_stacks` prints under a heading
        if event["kind"] == "exit":
            self._report_exit(event)
        else:
            self.tell(event)

    def _report_exit(self, event: Event) -> None:
        """Tell the launcher of a rank's end, with what the rank itself has reported about it."""
        if not self.has_launcher and self.ending.is_answer_to_stop(event["code"]):
            return  # the user asked for this end
        if event["killed"] and self.ending.reason is EndReason.ORDER:
            return  # the launcher knows of a failure elsewhere
        failure = self.activity.failure(event["rank"])
        report = None if failure is None else asdict(failure)
        self.tell({**event, "step": self.activity.step(), "report": report})

    def _ask_for_stacks(self) -> None:
        """Ask every rank for its Python stacks, which its fault handler writes to its log."""
        if self.log_sizes is not None:
            return  # they have been asked
        self.log_sizes = self.ranks.log_sizes()
        self.stacks_at = time.monotonic() + _STACK_SECONDS
        self.ranks.signal(signal.SIGUSR1)

    def _show_stacks(self, log_sizes: list[int]) -> None:
        """Show what the ranks have written to their logs since they were asked for stacks."""
        self.log_sizes = None
        for rank, log_size in zip(self.ranks.ranks, log_sizes, strict=True):
            self._print_line(f"--- stacks of rank {rank.rank} on {self.host.name} ---")
            for line in rank.stack_lines(log_size):
                self._print_line(line)
        self.tell({"kind": "stacks"})

    def _print_line(self, text: str) -> None:
        """Send a line for people."""
        for piece in text_events({"kind": "line", "rank": -1, "stream": "err"}, text):
            self.tell(piece)


if __name__ == "__main__":
    run_script(main, unload=False)
