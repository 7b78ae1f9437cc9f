"""Ranks of one start on one host, as a group: their variables, their processes, their output, and their watchdog."""

from __future__ import annotations

import contextlib
import os
import selectors
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from neox.launch.agent.agent_files import HOST_VARIABLE, PROGRESS_VARIABLE
from neox.launch.agent.rank_process import RankProcess
from neox.launch.agent.warm_ranks import RankAssignment, WarmRanks
from neox.launch.agent.watchdog import Watchdog
from neox.launch.commands import rank_command
from neox.launch.environment import child_environment, complete_on_host
from neox.launch.events import Event
from neox.launch.hosts.vendors import device_variables, variables_of_rank
from neox.launch.processes import process_state
from neox.launch.spec import Host, LaunchSpec
from neox.launch.status.event_log import RUN_DIRECTORY_VARIABLE

_POLL_SECONDS = 0.1
_END_POLL_SECONDS = 0.005  # after a rank has closed its output, which means that it is about to end
_ABOUT_TO_END_SECONDS = 1.0  # for which that is expected
_MOST_COMPILE_THREADS = 32  # of torch's own rule, which does not know of the other ranks on the host


def host_variables(
    spec: LaunchSpec, node_rank: int, host: Host, secrets: Mapping[str, str], progress_file: Path
) -> dict[str, str]:
    """Return the variables that all ranks of a host share.

    Args:
        spec: The run.
        node_rank: Number of the host.
        host: The host, with the slots that are used.
        secrets: Secret variables, which the specification does not hold.
        progress_file: File by which ranks report progress.
    """
    variables = child_environment({**os.environ, **spec.environment, **secrets})
    variables |= complete_on_host(spec.of_hosts, variables)
    threads = max(1, len(os.sched_getaffinity(0)) // len(host.slots))
    variables.setdefault("OMP_NUM_THREADS", str(threads))
    variables.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(min(_MOST_COMPILE_THREADS, threads)))
    variables |= device_variables(host.slots, variables)
    python_path = [spec.code_root]
    if spec.environment.get("PYTHONPATH"):
        python_path.append(spec.environment["PYTHONPATH"])
    return variables | {
        "PYTHONPATH": os.pathsep.join(python_path),
        "PYTHONUNBUFFERED": "1",
        HOST_VARIABLE: host.name,
        RUN_DIRECTORY_VARIABLE: spec.run_directory,
        PROGRESS_VARIABLE: str(progress_file),
        # as DeepSpeed's launcher sets them
        "MASTER_ADDR": spec.master_addr,
        "MASTER_PORT": str(spec.master_port),
        "WORLD_SIZE": str(spec.world_size),
        "LOCAL_SIZE": str(len(host.slots)),
        "CROSS_RANK": str(node_rank),
        "CROSS_SIZE": str(len(spec.hosts)),
    }


class RankGroup:
    """The ranks of one start on this host.

    Args:
        tell: Function that receives the events of the ranks.

    Attributes:
        ranks: The ranks, by their position on this host.
        environments: All variables of each rank.
        watchdog: The process that ends what ranks have started if the agent dies; None before the start.
    """

    def __init__(self, tell: Callable[[Event], None]) -> None:
        self.ranks: list[RankProcess] = []
        self.environments: list[dict[str, str]] = []
        self.watchdog: Watchdog | None = None
        self._tell = tell
        self._selector = selectors.DefaultSelector()
        self._about_to_end_until = 0.0  # a time of the monotonic clock

    def start(
        self, spec: LaunchSpec, node_rank: int, environment: Mapping[str, str], warm_ranks: WarmRanks | None
    ) -> None:
        """Start every rank. Only the agent's main thread may call this.

        Args:
            spec: The run.
            node_rank: Number of this host.
            environment: Variables that the ranks share.
            warm_ranks: Processes that can become ranks; None if there are none.
        """
        self.watchdog = Watchdog()
        first_rank = spec.first_rank(node_rank)
        for local_rank in range(len(spec.hosts[node_rank].slots)):
            number = first_rank + local_rank
            variables = {**variables_of_rank(environment, local_rank), "RANK": str(number)}
            stdin = spec.stdin if number == 0 else None
            warm_process = None
            if warm_ranks is not None:
                assignment = RankAssignment((spec.script, *spec.arguments), variables, spec.directory, stdin)
                warm_process = warm_ranks.take(local_rank, assignment)
            rank = RankProcess(number, spec.log_path(number), self._tell)
            if warm_process is None:
                rank.start(rank_command(spec), variables, spec.directory, stdin)
            else:
                rank.follow(warm_process)
            self.add(rank, variables)

    def add(self, rank: RankProcess, variables: dict[str, str]) -> None:
        """Follow a process that has been started."""
        self.ranks.append(rank)
        self.environments.append(variables)
        self.protect(rank.pid)
        for name, pipe in rank.pipes.items():
            self._selector.register(pipe, selectors.EVENT_READ, (rank, name))

    def are_running(self) -> bool:
        """Return whether a rank has not been seen to end."""
        return any(rank.is_running for rank in self.ranks)

    def read_output(self) -> list[RankProcess]:
        """Wait for output for a moment, process it, and return the ranks that have ended since the last call."""
        is_end_near = time.monotonic() < self._about_to_end_until
        ready = self._selector.select(_END_POLL_SECONDS if is_end_near else _POLL_SECONDS)
        for key, _ in ready:
            rank, name = key.data
            if not rank.read(name):
                self._selector.unregister(key.fileobj)
                self._about_to_end_until = time.monotonic() + _ABOUT_TO_END_SECONDS
        ended = []
        for rank in self.ranks:
            if rank.poll():
                self._forget(rank)
                ended.append(rank)
            else:
                rank.show_survived_traceback()
            if not ready:
                rank.show_incomplete_lines()
        return ended

    def _forget(self, rank: RankProcess) -> None:
        """Stop watching a rank that has ended: its process id may be reused."""
        self.unprotect(rank.pid)
        for pipe in rank.pipes.values():
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(pipe)
            pipe.close()

    def signal(self, signum: int) -> None:
        """Signal every rank that runs."""
        for rank in self.ranks:
            rank.signal(signum)

    def kill(self) -> None:
        """Kill every rank that runs, and what it has started."""
        for rank in self.ranks:
            rank.kill()

    def log_sizes(self) -> list[int]:
        """Return the size of each rank's log in bytes; 0 for a log that somebody has removed."""
        sizes = []
        for rank in self.ranks:
            size = 0
            with contextlib.suppress(FileNotFoundError):
                size = rank.log_path.stat().st_size
            sizes.append(size)
        return sizes

    def first_stopped(self) -> int | None:
        """Return the first rank that is stopped by a signal; None if none is."""
        for rank in self.ranks:
            if rank.is_running and process_state(rank.pid) == "T":
                return rank.rank
        return None

    # -- the watchdog

    def protect(self, pid: int) -> None:
        """Let the watchdog kill the process group that `pid` leads if the agent dies."""
        if self.watchdog is not None:
            self.watchdog.add(pid)

    def unprotect(self, pid: int) -> None:
        """Let the watchdog forget a process group that has ended."""
        if self.watchdog is not None:
            self.watchdog.remove(pid)

    def has_lost_watchdog(self) -> bool:
        """Return whether the watchdog has ended, so that nothing would end the ranks' children with the agent."""
        return self.watchdog is not None and self.watchdog.has_ended()

    def close(self) -> None:
        """Kill every rank, and end the watchdog, which kills what is left."""
        self.kill()
        if self.watchdog is not None:
            self.watchdog.close()
        self._selector.close()
