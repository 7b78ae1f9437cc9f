"""Processes of the launcher that lead to the agents: local agents, ssh, pdsh, srun or mpirun.

They end with the run. If the run may be restarted, each agent has a process of its own, which is the agent itself or
an ssh client, or all have one srun. These stay after a failure, and their standard input carries the order for the next
start.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence, Set
from types import TracebackType
from typing import Self

from neox.launch.events import LineBuffer
from neox.launch.orders import LauncherOrder, encode_order, start_order
from neox.launch.processes import exit_status, parent_death_hook
from neox.launch.spec import LaunchSpec

_LIFELINE_SECONDS = 3.0
_END_SECONDS = 4.0
_PIPE_BYTES = 2**20  # so that an order never waits for a connection


class AgentProcesses:
    """The processes and their outputs. Leaving the context ends the processes.

    Attributes:
        processes: The processes.
        hosts: The process that takes the orders for a host, by the host's name.
        buffers: Lines of their outputs, by file descriptor.
        selector: Selector of their outputs.
        statuses: Exit statuses of the processes that the last `end_all` has ended.
    """

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self.buffers: dict[int, LineBuffer] = {}
        self.selector = selectors.DefaultSelector()
        self.statuses: list[int] = []
        self.hosts: dict[str, subprocess.Popen[bytes]] = {}
        self._waiting: frozenset[str] = frozenset()  # hosts whose agents wait for the next start

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end_all()
        self.selector.close()

    def start(self, command: Sequence[str], environment: Mapping[str, str] | None, hosts: Sequence[str] = ()) -> None:
        """Start one process.

        Args:
            command: The command, as a list of arguments.
            environment: All its variables; None for those of this process.
            hosts: Names of the hosts to whose agents it passes its standard input on; none if it does not.
        """
        process = subprocess.Popen(
            command,
            env=None if environment is None else dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a terminal's Ctrl-C reaches only this process, which passes it on
            preexec_fn=parent_death_hook(signal.SIGTERM),
        )
        self.processes.append(process)
        if hosts:
            self.hosts |= dict.fromkeys(hosts, process)
            assert process.stdin is not None
            with contextlib.suppress(OSError):  # above this user's limit
                fcntl.fcntl(process.stdin.fileno(), fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            self.buffers[pipe.fileno()] = LineBuffer()
            self.selector.register(pipe, selectors.EVENT_READ)

    def signal(self, signum: int) -> None:
        """Signal all processes."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signum)

    def order(self, hosts: Iterable[str], order: LauncherOrder) -> None:
        """Send an order to the agents of hosts. Hosts whose process has ended are skipped.

        A process that leads to several hosts passes the order on to all of them.
        """
        line = encode_order(order)
        written: list[subprocess.Popen[bytes]] = []
        for name in hosts:
            process = self.hosts.get(name)
            if process is not None and process.stdin is not None and process not in written:
                written.append(process)
                with contextlib.suppress(OSError, ValueError):  # it has ended, or its input is closed
                    os.write(process.stdin.fileno(), line)

    def terminate(self, host: str) -> None:
        """Terminate the process of a host, without waiting for its end."""
        process = self.hosts.get(host)
        if process is not None and process.poll() is None:
            process.terminate()

    def connection_end(self, host: str) -> int | None:
        """Return the exit status of a host's process if it has ended and nothing is left to be read; else None."""
        process = self.hosts.get(host)
        if process is None or process.poll() is None:
            return None
        open_files = self.selector.get_map()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None and pipe in open_files:
                return None
        return exit_status(process.returncode)

    def host_of(self, descriptor: int) -> str | None:
        """Return the (first) host whose process writes to a descriptor; None if the process takes no orders."""
        for name, process in self.hosts.items():
            for pipe in (process.stdout, process.stderr):
                if pipe is not None and not pipe.closed and pipe.fileno() == descriptor:
                    return name
        return None

    def keep(self, hosts: Iterable[str]) -> None:
        """Record the hosts whose agents wait for the next start. End all other processes."""
        self._waiting = frozenset(hosts)
        self.end_all(except_for=self._waiting)

    def are_waiting(self, spec: LaunchSpec) -> bool:
        """Return whether the agents of all hosts wait for the next start."""
        return all(host.name in self._waiting for host in spec.hosts_with_agents)

    def restart_waiting(self, spec: LaunchSpec) -> list[int]:
        """Order the waiting agents to begin the next start. End all others.

        Returns:
            Numbers of the hosts that need a new agent.
        """
        staying: set[str] = set()
        new = []
        for node_rank, host in enumerate(spec.hosts_with_agents):
            if host.name in self._waiting and self.hosts[host.name].poll() is None:
                staying.add(host.name)
            else:
                new.append(node_rank)
        self._waiting = frozenset()
        self.end_all(except_for=staying)
        self.order(staying, start_order(spec))
        return new

    def end_all(self, except_for: Set[str] = frozenset()) -> None:
        """End processes: close their standard input, terminate them, and finally kill them.

        An agent kills its ranks when its standard input ends. pdsh and mpirun pass no standard input on.

        Args:
            except_for: Hosts whose processes keep running.
        """
        self._waiting &= except_for
        kept = {}
        for name in except_for:
            kept[name] = self.hosts[name]
        ending = [process for process in self.processes if process not in kept.values()]
        for process in ending:
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
        _wait_for_all(ending, _LIFELINE_SECONDS)
        for process in ending:
            if process.poll() is None:
                process.terminate()
        _wait_for_all(ending, _END_SECONDS)
        for process in ending:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self._forget(ending)
        self.processes = list(dict.fromkeys(kept.values()))
        self.hosts = kept

    def _forget(self, ended: Sequence[subprocess.Popen[bytes]]) -> None:
        self.statuses = [exit_status(process.returncode) for process in ended]
        for process in ended:
            for pipe in (process.stdout, process.stderr):
                if pipe is None:
                    continue
                self.buffers.pop(pipe.fileno(), None)
                with contextlib.suppress(KeyError):
                    self.selector.unregister(pipe)
                pipe.close()


def _wait_for_all(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.01, deadline - time.monotonic()))
