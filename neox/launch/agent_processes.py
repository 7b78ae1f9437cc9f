"""Processes of the launcher that lead to the agents: local agents, pdsh, srun or mpirun.

They end with the run. If the run may be started again on this machine, the agent stays after a failure, and gets the
next start through a file.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from neox.files import write_text
from neox.launch.agent_files import next_start_file
from neox.launch.events import LineBuffer
from neox.launch.lifeline import exit_status, parent_death_hook
from neox.launch.spec import LaunchSpec

_LIFELINE_SECONDS = 3.0
_END_SECONDS = 4.0


class AgentProcesses:
    """The processes, and what comes from their outputs. As a context, it ends them.

    Attributes:
        processes: The processes.
        buffers: Lines of their outputs, by file descriptor.
        selector: Selector of their outputs.
        statuses: Exit statuses of the processes that `end_all` has ended last.
    """

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self.buffers: dict[int, LineBuffer] = {}
        self.selector = selectors.DefaultSelector()
        self.statuses: list[int] = []
        self._waiting: LaunchSpec | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end_all()
        self.selector.close()

    def start(self, command: Sequence[str], environment: Mapping[str, str] | None) -> None:
        """Start one process.

        Args:
            command: Words of the command.
            environment: All its variables; those of this process if it is None.
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
        for pipe in (process.stdout, process.stderr):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            self.buffers[pipe.fileno()] = LineBuffer()
            self.selector.register(pipe, selectors.EVENT_READ)

    def signal(self, number: int) -> None:
        """Signal all processes."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)

    def keep(self, spec: LaunchSpec) -> None:
        """Note that the agents of a start have stayed, and wait for the next one."""
        self._waiting = spec

    def go_on(self, spec: LaunchSpec) -> bool:
        """Give the agents that have stayed the next start. If there are none for it, all processes are ended.

        Returns:
            Whether they have taken it over.
        """
        before = self._waiting
        self._waiting = None
        alive = bool(self.processes) and all(process.poll() is None for process in self.processes)
        if before is None or before.hosts != spec.hosts or not alive:
            self.end_all()
            return False
        for node_rank in range(len(spec.hosts)):
            write_text(next_start_file(before.run_id, node_rank), spec.encode())
        return True

    def end_all(self) -> None:
        """End all processes: close their standard input, terminate them, and finally kill them.

        An agent kills its ranks when its standard input ends. srun and mpirun pass no standard input on.
        """
        for process in self.processes:
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
        self._wait_for_all(_LIFELINE_SECONDS)
        for process in self.processes:
            if process.poll() is None:
                process.terminate()
        self._wait_for_all(_END_SECONDS)
        for process in self.processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self._forget()

    def _forget(self) -> None:
        for key in list(self.selector.get_map().values()):
            self.selector.unregister(key.fileobj)
        self.statuses = [exit_status(process.returncode) for process in self.processes]
        for process in self.processes:
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
        self.processes = []
        self.buffers = {}

    def _wait_for_all(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.01, deadline - time.monotonic()))
