"""Detection of preemption notices on a host: a command that succeeds, or a file that appears."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from neox.launch.processes import parent_death_hook, signal_group

_COMMAND_SECONDS = 10.0


@dataclass(frozen=True)
class PreemptionSource:
    """Source of preemption notices.

    Attributes:
        command: Shell command whose exit status 0 means a notice; None for no command.
        file: Path of a file whose existence means a notice; None for no file.
        every: Seconds between two checks.
    """

    command: str | None
    file: str | None
    every: float

    @property
    def exists(self) -> bool:
        """Whether a command or a file is given."""
        return self.command is not None or self.file is not None


class PreemptionWatch:
    """Thread of a host's agent that polls for preemption notices.

    Args:
        source: Source of notices.
        environment: Environment variables of the command.
        guard: Functions that register a command's process group when it starts, and unregister it when it has ended.
            A registered group is killed if the agent dies.
        command_seconds: Time in which the command must end; one that takes longer counts as no notice. 10 s if None.

    Attributes:
        notice: Description of the notice; None while there is none.
    """

    def __init__(
        self,
        source: PreemptionSource,
        environment: dict[str, str],
        guard: tuple[Callable[[int], None], Callable[[int], None]],
        command_seconds: float | None = None,
    ) -> None:
        self.notice: str | None = None
        self._source = source
        self._environment = environment
        self._add, self._remove = guard
        self._command_seconds = command_seconds or _COMMAND_SECONDS
        self._stopped = threading.Event()

    def start(self) -> None:
        """Start polling, if a command or a file is given."""
        if self._source.exists:
            threading.Thread(target=self._watch, daemon=True, name="preemption").start()

    def stop(self) -> None:
        """Stop polling."""
        self._stopped.set()

    def look(self) -> str | None:
        """Check once; return a description of the notice, or None."""
        file = self._source.file
        if file is not None and Path(file).exists():
            return f"{file} exists"
        command = self._source.command
        if command is not None and self._succeeds(command):
            return "preemption_command exited with status 0"
        return None

    def _watch(self) -> None:
        while self.notice is None:
            self.notice = self.look()
            if self._stopped.wait(self._source.every):
                return

    def _succeeds(self, command: str) -> bool:
        quiet = subprocess.DEVNULL
        with contextlib.suppress(OSError):
            process = subprocess.Popen(
                ["/bin/sh", "-c", command],
                env=self._environment,
                stdin=quiet,
                stdout=quiet,
                stderr=quiet,
                start_new_session=True,
                preexec_fn=parent_death_hook(),
            )
            self._add(process.pid)
            try:
                return process.wait(self._command_seconds) == 0
            except subprocess.TimeoutExpired:
                return False
            finally:
                signal_group(process.pid, signal.SIGKILL)
                process.wait()
                self._remove(process.pid)
        return False


@dataclass(frozen=True)
class ProbedNotice:
    """One look for a preemption notice, by the check of a host before a start.

    Attributes:
        command: Shell command whose exit status 0 means a notice; None for no command.
        file: Path of a file whose existence means a notice; None for no file.
        environment: Environment variables that the run adds to those of the host.
        seconds: Time in which the command must end; one that takes longer counts as no notice.
    """

    command: str | None
    file: str | None
    environment: Mapping[str, str]
    seconds: float

    def look(self) -> str | None:
        """Return a description of the notice; None without one."""
        source = PreemptionSource(self.command, self.file, every=0.0)
        variables = {**os.environ, **self.environment}
        return PreemptionWatch(source, variables, (_ignore, _ignore), min(self.seconds, _COMMAND_SECONDS)).look()


def _ignore(_: int) -> None:
    """Register nothing: the command ends with this process."""
