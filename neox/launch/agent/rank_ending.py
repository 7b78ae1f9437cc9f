"""End of the ranks of one host: the states that it passes through, its deadlines, and its reasons.

                  a stop signal is passed on
        RUNNING ------------------------------> STOPPING     ranks save and end by themselves; those that have not
           |                                     |    |      answered within the time to answer are killed
           | a reason to end                     |    |
           v              a reason to end        |    |
        ENDING <---------------------------------+    |      the other ranks log their errors
           |                                          |
           | the time for that has passed             | `stop_timeout` has passed
           v                                          |
        KILLING <-------------------------------------+      all that run are killed, again until none is left

A stop signal that arrives while the ranks are ENDING is passed on, but gives them no more time.
"""

from __future__ import annotations

import time
from enum import Enum, auto


class EndState(Enum):
    """State of the ranks of a host; see the picture above."""

    RUNNING = auto()
    STOPPING = auto()
    ENDING = auto()
    KILLING = auto()


class EndReason(Enum):
    """Why the ranks of a host are ended."""

    STOP_SIGNAL = "the user, the scheduler or a preemption notice asked for it"
    RANK_FAILED = "a rank of this host has failed"
    NO_PROGRESS = "no rank made progress for `hang_timeout`"
    NO_WATCHDOG = "the watchdog process has ended, and nothing would end the ranks with their agent"
    ORDER = "the launcher ordered it: another host has failed"


class RanksToKill(Enum):
    """Which ranks are to be killed now."""

    NONE = auto()
    SILENT = auto()  # those that have not answered the stop signal
    ALL = auto()


class RankEnding:
    """State machine for the end of one host's ranks. It decides; the agent acts.

    Attributes:
        state: The state.
        reason: Reason of the end; None while the ranks are RUNNING.
        stop_signal: The signal that was passed on to the ranks; None if none was.
        answer_seconds: Time that the ranks had to answer it.
    """

    def __init__(self) -> None:
        self.state = EndState.RUNNING
        self.reason: EndReason | None = None
        self.stop_signal: int | None = None
        self.answer_seconds = 0.0
        # Times of the monotonic clock; None if they are not set.
        self._answer_by: float | None = None
        self._kill_at: float | None = None

    def stop(self, signum: int, answer_seconds: float, stop_timeout: float) -> None:
        """Record that a stop signal is passed on to the ranks.

        Args:
            signum: The signal.
            answer_seconds: Seconds in which each rank must answer it.
            stop_timeout: Seconds in which all ranks must have ended.
        """
        self.stop_signal = signum
        self.answer_seconds = answer_seconds
        self._answer_by = time.monotonic() + answer_seconds
        self._kill_in(stop_timeout)
        if self.state is EndState.RUNNING:
            self.state = EndState.STOPPING
            self.reason = EndReason.STOP_SIGNAL

    def end(self, reason: EndReason, seconds: float) -> None:
        """End the ranks for a reason.

        Args:
            reason: The reason. The first one stays, unless the launcher orders the end.
            seconds: Time until they are killed. They may be killed earlier for an earlier reason.
        """
        self._kill_in(seconds)
        is_first = self.state in (EndState.RUNNING, EndState.STOPPING)
        if is_first or reason is EndReason.ORDER:
            self.reason = reason
        if is_first:
            self.state = EndState.ENDING

    def ranks_to_kill(self) -> RanksToKill:
        """Return which ranks are to be killed now. Those that are silent are named only once."""
        now = time.monotonic()
        if self._kill_at is not None and now >= self._kill_at:
            self.state = EndState.KILLING
            return RanksToKill.ALL
        if self._answer_by is not None and now >= self._answer_by:
            self._answer_by = None
            return RanksToKill.SILENT
        return RanksToKill.NONE

    def is_answer_to_stop(self, returncode: int) -> bool:
        """Return whether a rank has ended because of the stop signal, as its `returncode` or a shell's status says."""
        if self.stop_signal is None:
            return False
        return returncode in (-self.stop_signal, 128 + self.stop_signal)

    def _kill_in(self, seconds: float) -> None:
        kill_at = time.monotonic() + seconds
        if self._kill_at is None or kill_at < self._kill_at:
            self._kill_at = kill_at
