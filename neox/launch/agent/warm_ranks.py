"""Warm processes of a host's agent: one per slot, which has imported torch and DeepSpeed and waits to become a rank.

A rank needs seconds to import torch and DeepSpeed. The agent of a run that may be restarted has this done in advance:
after the first step, or at once on a spare host, it starts one process per slot, `python -m neox.launch.agent.bootstrap
--warm MODULE`. The process has the rank's own environment, because packages read variables while they are imported. It
imports at low priority, opens no GPU, and dies with the agent. At the next start it gets an assignment through its
standard input: the script, its arguments and all variables. If a variable that an import may have read differs, the
process is killed, and the rank is started without it.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from signal import SIGKILL

from neox.launch.agent.agent_files import LAUNCHER_VARIABLE, PROGRESS_VARIABLE
from neox.launch.processes import parent_death_hook, signal_group

# Nothing reads them before process groups are set up. A spare host, or one of a run that shrinks, gets other ranks.
MAY_DIFFER = (
    *("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "CROSS_RANK", "CROSS_SIZE"),
    *(LAUNCHER_VARIABLE, PROGRESS_VARIABLE),
)
"""Variables of a rank that no import reads."""
_PIPE_BYTES = 2**20  # so that an assignment never waits for a process that is still importing


@dataclass(frozen=True)
class RankAssignment:
    """Description of the rank that a warm process becomes.

    Attributes:
        argv: The script and its arguments.
        environment: All environment variables.
        directory: Working directory.
        stdin: Path of the file for its standard input; None for an empty input.
    """

    argv: Sequence[str]
    environment: Mapping[str, str]
    directory: str
    stdin: str | None


class WarmRanks:
    """The warm processes of one host. Only the agent's main thread may use them.

    Args:
        command: Command that starts a warm process.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._waiting: dict[int, tuple[subprocess.Popen[bytes], Mapping[str, str]]] = {}

    def prepare(self, local_rank: int, environment: Mapping[str, str], directory: str) -> None:
        """Start the warm process of a slot, unless it is already running.

        Args:
            local_rank: The slot's position on this host.
            environment: All variables of the slot's rank.
            directory: Working directory of the rank.
        """
        if local_rank in self._waiting:
            return
        process = subprocess.Popen(
            self._command,
            env=dict(environment),
            cwd=directory,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=parent_death_hook(),
        )
        assert process.stdin is not None
        with suppress(OSError):  # above this user's limit
            fcntl.fcntl(process.stdin.fileno(), fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._waiting[local_rank] = (process, environment)

    def take(self, local_rank: int, assignment: RankAssignment) -> subprocess.Popen[bytes] | None:
        """Turn the warm process of a slot into a rank, and return the process.

        Args:
            local_rank: The slot's position on this host.
            assignment: The rank.

        Returns:
            The process, whose pipes hold what it has printed so far; None if there is no suitable process.
        """
        if local_rank not in self._waiting:
            return None
        process, environment = self._waiting.pop(local_rank)
        fits = _read_by_imports(environment) == _read_by_imports(assignment.environment)
        if not fits or process.poll() is not None:
            _end(process)
            return None
        assert process.stdin is not None
        with suppress(OSError):  # if it is still importing, it should no longer yield to other processes
            os.setpriority(os.PRIO_PROCESS, process.pid, os.getpriority(os.PRIO_PROCESS, 0))
        try:
            with process.stdin as pipe:
                pipe.write(json.dumps(vars(assignment)).encode() + b"\n")
        except OSError:  # it has ended just now
            _end(process)
            return None
        return process

    def close(self) -> None:
        """End all processes that are still waiting."""
        while self._waiting:
            _, (process, _) = self._waiting.popitem()
            _end(process)


def _read_by_imports(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that an import may have read."""
    return {name: value for name, value in environment.items() if name not in MAY_DIFFER}


def _end(process: subprocess.Popen[bytes]) -> None:
    signal_group(process.pid, SIGKILL)
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()
