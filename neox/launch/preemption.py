"""Notices that a host is about to be taken away: a command that succeeds, or a file that appears."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from neox.launch.lifeline import parent_death_hook, signal_group

_COMMAND_SECONDS = 10.0  # a command that takes longer counts as no notice


@dataclass(frozen=True)
class PreemptionSource:
    """Where a notice comes from.

    Attributes:
        command: Shell command that ends with status 0 once there is a notice; None for no command.
        file: Path of a file that appears with the notice; None for no file.
        every: Seconds between two looks.
    """

    command: str | None
    file: str | None
    every: float

    @property
    def exists(self) -> bool:
        """Whether there is anything to look at."""
        return self.command is not None or self.file is not None


class PreemptionWatch:
    """Watch of one host, in a thread of its agent.

    Args:
        source: Where a notice comes from.
        environment: Variables of the command.
        guard: Functions that receive the process group of a command when it starts, and when it has ended. The group
            is killed if the agent dies meanwhile.

    Attributes:
        notice: What was noticed, in words; None so far.
    """

    def __init__(
        self,
        source: PreemptionSource,
        environment: dict[str, str],
        guard: tuple[Callable[[int], None], Callable[[int], None]],
    ) -> None:
        self.notice: str | None = None
        self._source = source
        self._environment = environment
        self._add, self._remove = guard
        self._stopped = threading.Event()

    def start(self) -> None:
        """Start to look, if there is anything to look at."""
        if self._source.exists:
            threading.Thread(target=self._watch, daemon=True, name="preemption").start()

    def stop(self) -> None:
        """Look no more."""
        self._stopped.set()

    def look(self) -> str | None:
        """Return what is noticed now, in words; None for nothing."""
        file = self._source.file
        if file is not None and Path(file).exists():
            return f"{file} has appeared"
        command = self._source.command
        if command is not None and self._succeeds(command):
            return "preemption_command has ended with status 0"
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
                return process.wait(_COMMAND_SECONDS) == 0
            except subprocess.TimeoutExpired:
                return False
            finally:
                signal_group(process.pid, signal.SIGKILL)
                process.wait()
                self._remove(process.pid)
        return False
