"""Ending early: SIGTERM and Ctrl-C finish the step, save, and leave with an exit code that tells which it was."""

from __future__ import annotations

import signal
from types import FrameType

from neox.launch import acknowledge_stop
from neox.log import get_logger

_log = get_logger(__name__)
_EXIT_CODES = {signal.SIGTERM: 0, signal.SIGINT: 130}


class StopSignals:
    """Remembers the first SIGTERM or SIGINT; the second one acts as if nobody had asked to remember.

    A context manager: the former handlers are back afterwards.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._former: dict[signal.Signals, signal.Handlers] = {}

    def __enter__(self) -> StopSignals:
        for signum in _EXIT_CODES:
            self._former[signum] = signal.signal(signum, self._remember)  # type: ignore[assignment]
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._former.items():
            signal.signal(signum, handler)

    @property
    def exit_code(self) -> int:
        """The process's exit status after a clean end: 0 for SIGTERM (what a scheduler sends), 130 for Ctrl-C."""
        return _EXIT_CODES[self.received] if self.received is not None else 0

    def _remember(self, signum: int, frame: FrameType | None) -> None:
        if self.received is not None:
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)
            return
        self.received = signal.Signals(signum)
        acknowledge_stop()  # the launcher leaves time to save to those who say this
        _log.warning("%s: ending after this step; once more ends at once", self.received.name)


def ignore_signals() -> None:
    """Ignore SIGTERM and SIGINT from here on: this process is about to end by itself, with an exit code of its own."""
    for signum in _EXIT_CODES:
        signal.signal(signum, signal.SIG_IGN)
