"""Agent of one host: starts the host's ranks, follows them, and ends them together.

`python -m neox.launch.agent.host_agent SPEC --node_rank N [--lifeline] [--plain]`. Its standard output carries events
(`neox.launch.events`) to the launcher. It ends its ranks in these cases:

- a rank has failed;
- SIGTERM or SIGINT arrives, which it passes on to the ranks. Those that answer (`acknowledge_stop`) or are saving have
  `stop_timeout` seconds to end; the others are killed after five seconds;
- with `--lifeline`, the launcher or the ssh connection has ended: standard input ends, output cannot be written, or
  the network is cut;
- no rank has made progress for `hang_timeout` seconds.

On SIGUSR1 it shows every rank's stacks.

The agent of a run that may be started again (`warm_module`) takes orders on its standard input (`neox.launch.orders`).
It stays after a failure, with its warm processes, until the launcher ends it or orders the next start. On a spare host
it waits from the beginning.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import selectors
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from neox.errors import LaunchError, run_script
from neox.launch.agent.agent_files import (
    HOST_VARIABLE,
    INTERRUPT_RANKS,
    PROGRESS_VARIABLE,
    STOP_RANKS,
    RankActivity,
    agent_directory,
    create_agent_directory,
    take_secrets,
)
from neox.launch.agent.plain_output import PlainOutput
from neox.launch.agent.preemption import PreemptionSource, PreemptionWatch
from neox.launch.agent.rank_process import RankProcess, Watchdog
from neox.launch.agent.warm_ranks import Order, WarmRanks
from neox.launch.commands import rank_command, warm_command
from neox.launch.environment import child_environment, complete_on_host, remove_stale_locks
from neox.launch.events import Event, encode_event, text_events
from neox.launch.failures import EXIT_HANG
from neox.launch.hosts.vendors import device_variables, variables_of_rank
from neox.launch.lifeline import exit_status, follow_launcher, is_unanswered, process_state, ssh_ports
from neox.launch.orders import Orders
from neox.launch.run_lock import lock_directories
from neox.launch.spec import LaunchSpec
from neox.launch.status.event_log import RUN_DIRECTORY_VARIABLE

_POLL_SECONDS = 0.1
_END_POLL_SECONDS = 0.005  # after a rank has closed its output, which means that it is about to end
_HEARTBEAT_SECONDS = 1.0
_AFTER_FAILURE_SECONDS = 0.7  # until the other ranks are killed; their own errors reach their logs meanwhile
_AFTER_KILL_SECONDS = 0.1  # the same after a SIGKILL, which needs no explanation by the other ranks
_STACK_SECONDS = 1.5
_MOST_COMPILE_THREADS = 32  # of torch's own rule, which does not know of the other ranks on the host


class Silence:
    """Time for which no rank of this host has reported progress or printed.

    Times of files are those of a wall clock, which may be set while the ranks run. So only a change of such a time
    counts, and the seconds since then are those of the monotonic clock.

    Args:
        activity: Files of the ranks.
    """

    def __init__(self, activity: RankActivity) -> None:
        self._activity = activity
        self._times = self._read_times()
        self._changed_at = time.monotonic()

    def seconds(self) -> float:
        """Return the seconds since the last change that a call of this method has found, or since the start."""
        times = self._read_times()
        now = time.monotonic()
        if times != self._times:
            self._times = times
            self._changed_at = now
        return now - self._changed_at

    def _read_times(self) -> dict[Path, int]:
        """Return when each file was last written, in nanoseconds of the wall clock."""
        times = {}
        for path in (self._activity.file, *self._activity.log_dir.glob("rank_*.log")):
            with contextlib.suppress(OSError):  # not written yet
                times[path] = path.stat().st_mtime_ns
        return times


class NodeAgent:
    """The agent of one host.

    Args:
        spec: The run.
        node_rank: Number of this host, from 0. Spare hosts follow those with ranks.
        plain: Whether to print for people, because no launcher process reads the events.
        warm: The processes that can become ranks; None if this agent ends with its ranks.
        orders: Orders of the launcher.
        secrets: Secret variables of the ranks, which this host received at its first start; None at the first start.
    """

    def __init__(
        self,
        spec: LaunchSpec,
        node_rank: int,
        plain: bool = False,
        warm: WarmRanks | None = None,
        orders: Orders | None = None,
        secrets: Mapping[str, str] | None = None,
    ) -> None:
        self.spec = spec
        self.node_rank = node_rank
        self.plain = PlainOutput(spec) if plain else None
        self.warm = warm
        self.warm_prepared = False
        self.orders = orders or Orders()
        self.secrets = secrets
        self.host = spec.hosts_with_agents[node_rank]
        self.directory = agent_directory(spec.run_id, node_rank)
        self.locks = contextlib.ExitStack()  # of the run's directories, if no launcher process holds them
        self.selector = selectors.DefaultSelector()
        self.ranks: list[RankProcess] = []
        self.rank_environments: list[dict[str, str]] = []
        self.watchdog: Watchdog | None = None
        self.preemption: PreemptionWatch | None = None
        self.code = 0  # exit status of this agent
        # Requests by signals: handlers set them, and the loop fulfils them.
        self.stop_requested: int | None = None
        self.stacks_requested = False
        self.interrupt_requested = False
        self.preemption_reported = False
        self.ended_by_order = False
        # How the ranks are ended. Times are those of the monotonic clock; None if they are not set.
        self.stop_passed_on = False
        self.answer_seconds = 0.0  # time in which ranks must answer the signal
        self.answer_by: float | None = None
        self.kill_at: float | None = None
        # Output
        self.showing_stacks = False
        self.output_ended = False  # whether a rank has closed its output, since the last heartbeat

    # -- output

    def tell(self, event: Event) -> None:
        """Send an event to the launcher. If nothing reads it any more, the run ends."""
        try:
            if self.plain is not None:
                self.plain.take(event)
                return
            sys.stdout.write(encode_event({**event, "node": self.node_rank}) + "\n")
            sys.stdout.flush()
        except OSError:
            self.end_now()

    def print_line(self, text: str) -> None:
        """Send a line for people."""
        for piece in text_events({"kind": "line", "rank": -1, "stream": "err"}, text):
            self.tell(piece)

    def _pass_on(self, event: Event) -> None:
        """Send an event of a rank to the launcher, unless it is not needed."""
        if self.showing_stacks and event["kind"] == "line":
            return  # these are stacks of rank 0, which are shown below a title
        if self.plain is not None and event["kind"] == "exit" and self._was_asked_to_end(event["code"]):
            return  # the user asked for this end
        if event["kind"] == "exit" and event["killed"] and self.ended_by_order:
            return  # the launcher knows of a failure elsewhere
        if event["kind"] == "exit":
            failure = self.activity.failure(event["rank"])
            report = None if failure is None else asdict(failure)
            event = {**event, "step": self.activity.step(), "report": report}
        self.tell(event)

    # -- start

    def run(self) -> int:
        """Start the ranks and follow them until the last has ended.

        Returns:
            The exit status of the rank that failed first, or 0.
        """
        self._install_signal_handlers()
        if self.plain is not None and self.node_rank == 0:
            lock_directories(self.spec.reserved, Path(self.spec.script).name, self.locks)
        log_directory = self.spec.log_directory(self.host)
        log_directory.mkdir(parents=True, exist_ok=True)
        create_agent_directory(self.spec.run_id, self.node_rank)
        self.activity = RankActivity(self.directory / "progress", log_directory)
        self.silence = Silence(self.activity)
        try:
            for lock in remove_stale_locks():
                self.print_line(f"{self.host.name}: removed {lock}, left by a build whose process has ended")
            self.watchdog = Watchdog()
            self.tell({"kind": "node", "host": self.host.name, "pid": os.getpid()})
            self._start_ranks(self.environment(), self.watchdog)
            self._watch_for_preemption(self.watchdog)
            self._watch(self.watchdog)
        finally:
            if self.preemption is not None:
                self.preemption.stop()
            self._kill_ranks()
            if self.watchdog is not None:
                self.watchdog.close()
            self.selector.close()
            shutil.rmtree(self.directory, ignore_errors=True)
        self.tell({"kind": "done", "code": self.code})
        return self.code

    def _install_signal_handlers(self) -> None:
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, STOP_RANKS):
            signal.signal(signum, self._on_stop)
        signal.signal(signal.SIGUSR1, self._on_stacks)
        signal.signal(INTERRUPT_RANKS, self._on_interrupt)

    def stand_by(self) -> None:
        """Prepare this spare host to replace another one, with as many slots as the first host has."""
        self._install_signal_handlers()
        self.selector.close()
        slots = self.host.slots[: len(self.spec.hosts[0].slots)]
        self.host = replace(self.host, slots=slots)
        environment = self.environment()
        for local_rank in range(len(slots)):
            self.rank_environments.append(variables_of_rank(environment, local_rank))
        self._prepare_warm_ranks()

    def wait_for_next(self) -> NodeAgent | None:
        """Wait for the next start, after a failure or on a spare host.

        Returns:
            The agent of the next start; None if there is none.
        """
        if self.warm is None or (self.code == 0 and not self.is_spare):
            return None
        while self.stop_requested is None:
            spec = self.orders.next_start(_HEARTBEAT_SECONDS)
            if spec is not None:
                number = spec.number_of(self.host.name)
                if number is None:
                    return None
                return NodeAgent(spec, number, warm=self.warm, orders=self.orders, secrets=self.secrets)
            self.tell({"kind": "waiting"})  # a lost network is only noticed by writing
        return None

    @property
    def is_spare(self) -> bool:
        """Whether this host has no ranks in this start."""
        return self.node_rank >= len(self.spec.hosts)

    def environment(self) -> dict[str, str]:
        """Return the variables that all ranks of this host share."""
        if self.secrets is None:
            self.secrets = take_secrets(self.spec.run_id, self.node_rank)
        variables = child_environment({**os.environ, **self.spec.environment, **self.secrets})
        variables |= complete_on_host(self.spec.of_hosts, variables)
        python_path = [self.spec.code_root]
        if self.spec.environment.get("PYTHONPATH"):
            python_path.append(self.spec.environment["PYTHONPATH"])
        slots = self.host.slots
        threads = max(1, len(os.sched_getaffinity(0)) // len(slots))
        variables.setdefault("OMP_NUM_THREADS", str(threads))
        variables.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(min(_MOST_COMPILE_THREADS, threads)))
        return (
            variables
            | device_variables(slots, variables)
            | {
                "PYTHONPATH": os.pathsep.join(python_path),
                "PYTHONUNBUFFERED": "1",
                HOST_VARIABLE: self.host.name,
                RUN_DIRECTORY_VARIABLE: self.spec.run_directory,
                PROGRESS_VARIABLE: str(self.directory / "progress"),
                # as DeepSpeed's launcher sets them
                "MASTER_ADDR": self.spec.master_addr,
                "MASTER_PORT": str(self.spec.master_port),
                "WORLD_SIZE": str(self.spec.world_size),
                "LOCAL_SIZE": str(len(slots)),
                "CROSS_RANK": str(self.node_rank),
                "CROSS_SIZE": str(len(self.spec.hosts)),
            }
        )

    def _start_ranks(self, environment: dict[str, str], watchdog: Watchdog) -> None:
        first = self.spec.first_rank(self.node_rank)
        for local_rank in range(len(self.host.slots)):
            number = first + local_rank
            rank = RankProcess(number, self.spec.log_path(number), self._pass_on)
            variables = {**variables_of_rank(environment, local_rank), "RANK": str(number)}
            stdin = self.spec.stdin if number == 0 else None
            order = Order((self.spec.script, *self.spec.arguments), variables, self.spec.directory, stdin)
            warm_process = None
            if self.warm is not None:
                warm_process = self.warm.take(local_rank, order)
            if warm_process is None:
                rank.start(rank_command(self.spec), variables, self.spec.directory, stdin)
            else:
                rank.follow(warm_process)
            self.rank_environments.append(variables)
            self.ranks.append(rank)
            watchdog.add(rank.pid)
            for name, pipe in rank.pipes.items():
                self.selector.register(pipe, selectors.EVENT_READ, (rank, name))

    def _prepare_warm_ranks(self) -> None:
        """Start the warm processes."""
        if self.warm is None or self.warm_prepared:
            return
        self.warm_prepared = True
        for local_rank, variables in enumerate(self.rank_environments):
            self.warm.prepare(local_rank, variables, self.spec.directory)

    def _watch_for_preemption(self, watchdog: Watchdog) -> None:
        spec = self.spec
        source = PreemptionSource(spec.preemption_command, spec.preemption_file, spec.preemption_seconds)
        variables = {**os.environ, **spec.environment}
        self.preemption = PreemptionWatch(source, variables, (watchdog.add, watchdog.remove))
        self.preemption.start()

    # -- watch

    def _watch(self, watchdog: Watchdog) -> None:
        """Follow the ranks until all have ended."""
        last_beat = time.monotonic()
        while any(rank.is_running for rank in self.ranks):
            self._handle_output(_END_POLL_SECONDS if self.output_ended else _POLL_SECONDS)
            now = time.monotonic()
            if now - last_beat >= _HEARTBEAT_SECONDS:
                last_beat = now
                self.output_ended = False
                self.tell({"kind": "alive", "step": self.activity.step()})
                if self.activity.step() is not None:  # not before the first step, which they would delay
                    self._prepare_warm_ranks()
            self.activity.update()
            self._fulfil_requests(now)
            self._kill_what_is_overdue(now)
            if watchdog.has_ended() and self.kill_at is None:
                self.print_line(f"the watchdog process on {self.host.name} has ended: the run is ended")
                self.code = self.code or 1
                self._kill_in(0.0)
            self._check_progress()

    def _fulfil_requests(self, now: float) -> None:
        """Do what signals and orders have asked for since the last call."""
        if self.orders.has_ended(self.spec) and not self.ended_by_order:
            self.ended_by_order = True
            self.code = self.code or 1
            self._kill_in(0.0)
        if self.stacks_requested:
            self._show_stacks()
        if self.interrupt_requested:
            self.interrupt_requested = False
            for rank in self.ranks:
                rank.signal(signal.SIGINT)
        if self.preemption is not None and self.preemption.notice is not None:
            self._report_preemption(self.preemption.notice)
        if self.stop_requested is not None and not self.stop_passed_on:
            self._pass_on_stop(self.stop_requested, now)

    def _report_preemption(self, notice: str) -> None:
        """Tell the launcher that this host is about to be preempted; it asks all ranks to save and end."""
        if self.preemption_reported or self.stop_requested is not None:
            return
        self.preemption_reported = True
        self.tell({"kind": "preempted", "notice": notice})
        if self.plain is not None:  # there is no launcher
            self.print_line(f"{self.host.name} is about to be preempted ({notice}): its ranks save and end")
            self.stop_requested = signal.SIGTERM

    def _kill_what_is_overdue(self, now: float) -> None:
        if self.answer_by is not None and now >= self.answer_by:
            self._kill_silent_ranks()
        if self.kill_at is not None and now >= self.kill_at:
            self._kill_ranks()

    def _handle_output(self, seconds: float) -> None:
        """Wait for output, process it, and check which ranks have ended."""
        ready = self.selector.select(seconds)
        for key, _ in ready:
            rank, name = key.data
            if not rank.read(name):
                self.selector.unregister(key.fileobj)
                self.output_ended = True
        for rank in self.ranks:
            if rank.poll():
                self._take_end(rank)
            else:
                rank.show_survived_traceback()
            if not ready:
                rank.show_incomplete_lines()

    def _take_end(self, rank: RankProcess) -> None:
        """Record that a rank has ended. If it has failed, the others are killed soon."""
        if self.watchdog is not None:
            self.watchdog.remove(rank.pid)  # its process id may be reused
        for pipe in rank.pipes.values():
            with contextlib.suppress(KeyError, ValueError):
                self.selector.unregister(pipe)
            pipe.close()
        if rank.code:
            self.code = self.code or exit_status(rank.code)
            if not self._was_asked_to_end(rank.code):  # the others wait for this rank, and cannot save without it
                self._kill_in(_AFTER_KILL_SECONDS if rank.code == -signal.SIGKILL else _AFTER_FAILURE_SECONDS)

    def _was_asked_to_end(self, code: int) -> bool:
        """Return whether a rank has ended because of the signal that was passed on, given its `returncode`."""
        number = self.stop_requested
        return self.stop_passed_on and number is not None and code in (-number, 128 + number)

    # -- end

    def _on_stop(self, number: int, _frame: Any) -> None:
        # Ranks save at SIGTERM; a closed terminal asks for the same.
        self.stop_requested = signal.SIGTERM if number in (signal.SIGHUP, STOP_RANKS) else number

    def _on_stacks(self, *_: Any) -> None:
        self.stacks_requested = True

    def _on_interrupt(self, *_: Any) -> None:
        self.interrupt_requested = True

    def _kill_in(self, seconds: float) -> None:
        """Kill all ranks after some seconds, or earlier if an earlier time is set."""
        at = time.monotonic() + seconds
        self.kill_at = at if self.kill_at is None else min(self.kill_at, at)

    def _pass_on_stop(self, signum: int, now: float) -> None:
        self.stop_passed_on = True
        self._kill_in(self.spec.stop_timeout)
        self.answer_seconds = self.activity.answer_seconds()
        self.answer_by = now + self.answer_seconds
        for rank in self.ranks:
            rank.signal(signum)

    def _kill_silent_ranks(self) -> None:
        """Kill the ranks that have not answered the signal. The others then end as well."""
        self.answer_by = None
        for rank in self.ranks:
            if rank.is_running and not self.activity.has_answered(rank.rank):
                where = f"rank {rank.rank} on {self.host.name}"
                self.print_line(f"{where} did not answer the signal within {self.answer_seconds:.0f} s: killed")
                rank.kill()

    def _kill_ranks(self) -> None:
        for rank in self.ranks:
            rank.kill()

    def end_now(self) -> None:
        """Kill everything and exit, because the launcher is gone."""
        if self.warm is not None:
            self.warm.close()
        self._kill_ranks()
        shutil.rmtree(self.directory, ignore_errors=True)
        if self.watchdog is not None:
            self.watchdog.close()
        os._exit(1)

    # -- hangs

    def _check_progress(self) -> None:
        """End the run if no rank of this host has made progress for `hang_timeout` seconds."""
        timeout = self.spec.hang_timeout
        if timeout is None or self.kill_at is not None:
            return
        silent_seconds = self.silence.seconds()
        if silent_seconds < timeout:
            return
        self.code = EXIT_HANG
        step = self.activity.step()
        self.tell({"kind": "hang", "seconds": silent_seconds, "step": step, "stopped": self._stopped_rank()})
        self._show_stacks()
        self.stacks_requested = False  # the launcher now asks every host, and this one has just shown its stacks
        self.kill_at = time.monotonic()

    def _stopped_rank(self) -> int | None:
        """Return the first rank that is stopped by a signal; None if none is."""
        for rank in self.ranks:
            if rank.is_running and process_state(rank.pid) == "T":
                return rank.rank
        return None

    def _show_stacks(self) -> None:
        """Ask every rank for its Python stacks, and show what they wrote."""
        self.stacks_requested = False
        sizes = [rank.log_path.stat().st_size for rank in self.ranks]
        for rank in self.ranks:
            rank.signal(signal.SIGUSR1)
        deadline = time.monotonic() + _STACK_SECONDS
        self.showing_stacks = True
        while time.monotonic() < deadline:
            self._handle_output(_POLL_SECONDS)
        self.showing_stacks = False
        for rank, log_size in zip(self.ranks, sizes, strict=True):
            self.print_line(f"--- stacks of rank {rank.rank} on {self.host.name} ---")
            for line in rank.stack_lines(log_size):
                self.print_line(line)
        self.tell({"kind": "stacks"})


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
        return HostStarts(spec, node_rank, arguments.lifeline, arguments.plain).run()
    except OSError as error:  # usually about the run's directories
        raise LaunchError(f"ranks cannot be started on {spec.hosts_with_agents[node_rank].name}: {error}") from None


class HostStarts:
    """All starts of a run on this host, one after another in this process.

    Args:
        spec: The first start.
        node_rank: Number of this host in it.
        lifeline: Whether to take orders from standard input, and to end with it.
        plain: Whether to print for people.
    """

    def __init__(self, spec: LaunchSpec, node_rank: int, lifeline: bool, plain: bool) -> None:
        command = warm_command(spec)
        self.warm = WarmRanks(command) if command is not None and lifeline else None
        self.lifeline = lifeline
        self.agent = NodeAgent(spec, node_rank, plain, self.warm, Orders())

    def run(self) -> int:
        """Run one start after another, as long as the launcher orders any. Return the status of the last."""
        if self.lifeline:
            self._follow_launcher()
        try:
            while True:
                if self.agent.is_spare:
                    self.agent.stand_by()
                else:
                    self.agent.run()
                next_agent = self.agent.wait_for_next()
                if next_agent is None:
                    return self.agent.code
                self.agent = next_agent
        finally:
            if self.warm is not None:
                self.warm.close()

    def _follow_launcher(self) -> None:
        """End the agent and its ranks when the launcher, or the ssh connection to it, has ended."""
        ports = ssh_ports(os.environ)
        follow_launcher(
            sys.stdin.fileno(),
            lambda: self.agent.end_now(),  # of the start at that time
            lambda: ports is not None and is_unanswered(ports),
            on_input=self.agent.orders.feed,
        )


def _node_rank(text: str) -> int:
    """Return a host's number; srun and mpirun, which start one agent per host, set it in the environment."""
    if text != "auto":
        return int(text)
    for name in ("SLURM_NODEID", "OMPI_COMM_WORLD_RANK", "PMIX_RANK"):
        if name in os.environ:
            return int(os.environ[name])
    raise LaunchError("neither SLURM_NODEID nor OMPI_COMM_WORLD_RANK is set: was this started by srun or mpirun?")


if __name__ == "__main__":
    run_script(main, unload=False)
