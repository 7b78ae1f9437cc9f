"""Restart policy for failed runs: restart at once, after a pause, or not at all.

    how the start has ended                                        decision
    ------------------------------------------------------------   --------------------------------------------------
    finished, or ended by a signal to the launcher                 stop
    a host that nothing can replace does not answer (no start)     try again for an hour; this uses up no restart
    the chosen checkpoint is damaged, or another one counts        restart from another; this uses up no restart
    preempted, and no other host can be used                       stop
    the configuration was rejected; no agent has ever started;     stop
      a disk is full; all checkpoints were damaged twice;
      the loss of the same step was not finite twice
    any failure, and `max_restarts` are used up                    stop
    at the same step as before, or the same rank within a minute   restart after a pause that doubles, up to 300 s
    any other failure                                              restart at once

The first line that applies decides.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from neox.launch.agent.agent_files import Cause
from neox.launch.supervisor.outcome import EndKind, RunEnd

EXIT_REFUSED = 2
"""Exit status of a script that rejects its configuration or command line."""
_FIRST_PAUSE = 1.0  # seconds
_LONGEST_PAUSE = 300.0
_MOST_DOUBLINGS = 16  # of the pause, which is the longest one by then
_LONGEST_PAUSE_FOR_HOSTS = 60.0
_WAIT_FOR_HOSTS_SECONDS = 3600.0  # longer than a reboot and most repairs of a network
_MOST_STALE_STARTS = 20  # checkpoints that are damaged one after the other
_SOON_SECONDS = 60.0  # a rank that fails this soon after a start has probably not failed by chance


@dataclass(frozen=True)
class RestartDecision:
    """Decision about a run that has ended.

    Attributes:
        restart: Whether to restart the run.
        reason: Reason of the decision; empty for a run that has not failed.
        pause: Seconds to wait before the restart.
    """

    restart: bool
    reason: str = ""
    pause: float = 0.0

    @property
    def text(self) -> str:
        """The decision as text for the event log."""
        if not self.restart:
            return "stop"
        if self.pause:
            return f"restart after {self.pause:.0f} s"
        return "restart"


class RestartPolicy:
    """Restart policy of one run, which takes earlier failures into account.

    Args:
        allowed: Maximum number of restarts (`max_restarts`).
        clock: Function that returns a time in seconds.

    Attributes:
        restarts: Number of restarts so far.
    """

    def __init__(self, allowed: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.allowed = allowed
        self.restarts = 0
        self._clock = clock
        self._started_at = clock()
        self._last: RunEnd | None = None
        self._repeats = 0  # consecutive failures that repeat the previous one
        self._not_finite: set[int | None] = set()  # steps at which a loss or gradient norm was not finite
        self._waits = 0  # consecutive tries to start without an answer of a host
        self._waits_since = 0.0
        self._stale = 0  # consecutive starts from a checkpoint that could not be used

    def started(self) -> None:
        """Record the time of a start or restart."""
        self._started_at = self._clock()
        self._waits = 0

    def decide(self, end: RunEnd, *, can_move: bool = False) -> RestartDecision:
        """Decide whether to restart the run, and remember its end.

        Args:
            end: How the run has ended.
            can_move: Whether the run can continue without a host that is about to be preempted.
        """
        if end.kind is EndKind.ASKED or (end.kind is EndKind.FINISHED and end.status == 0):
            return RestartDecision(restart=False)
        if end.asked:
            return RestartDecision(restart=False, reason="it was asked to end")
        if end.kind is EndKind.NOT_STARTED:
            return self._wait_for_host(end)
        if end.reported_cause == Cause.STALE_START:
            return self._decide_about_checkpoint(end)
        if end.kind is EndKind.PREEMPTED and not can_move:
            reason = "the host is about to be preempted, and no other host can replace it; start the run elsewhere"
            return RestartDecision(restart=False, reason=reason)
        previous = self._last
        self._last = end
        self._stale = 0
        why_useless = self._why_useless(end, previous)
        if why_useless:
            return RestartDecision(restart=False, reason=why_useless)
        if self.restarts >= self.allowed:
            reason = f"max_restarts is {self.allowed}"
            if self.allowed:
                reason += ", and all restarts are used up; the same command resumes the run"
            return RestartDecision(restart=False, reason=reason)
        self.restarts += 1
        reason = f"restart {self.restarts} of {self.allowed}"
        repetition = self._repetition(end, previous)
        if not repetition:
            self._repeats = 0
            return RestartDecision(restart=True, reason=reason)
        pause = _pause_after(self._repeats, _LONGEST_PAUSE)
        self._repeats += 1
        return RestartDecision(restart=True, reason=f"{reason}, after a pause because {repetition}", pause=pause)

    def _decide_about_checkpoint(self, end: RunEnd) -> RestartDecision:
        """Decide whether to start again from another checkpoint. No restart is used up."""
        self._stale += 1
        if self._stale > _MOST_STALE_STARTS:
            reason = f"{_MOST_STALE_STARTS} decisions about the checkpoint did not hold"
            return RestartDecision(restart=False, reason=reason)
        reason = "the checkpoints have changed since the launcher looked"
        if end.damaged_checkpoint is not None:
            reason = f"{end.damaged_checkpoint} is damaged"
        return RestartDecision(restart=True, reason=f"{reason}; this uses up no restart")

    def _wait_for_host(self, end: RunEnd) -> RestartDecision:
        """Decide whether to try once more to start with a host that does not answer. No restart is used up."""
        now = self._clock()
        if self._waits == 0:
            self._waits_since = now
        if now - self._waits_since >= _WAIT_FOR_HOSTS_SECONDS:
            minutes = _WAIT_FOR_HOSTS_SECONDS / 60
            return RestartDecision(
                restart=False, reason=f"{end.cause} for {minutes:.0f} minutes; the same command resumes the run"
            )
        pause = _pause_after(self._waits, _LONGEST_PAUSE_FOR_HOSTS)
        self._waits += 1
        return RestartDecision(restart=True, reason=f"{end.cause}, and nothing can replace it", pause=pause)

    def _repetition(self, end: RunEnd, previous: RunEnd | None) -> str:
        """Return how a failure repeats the previous one; empty if it does not."""
        if previous is None:
            return ""
        if end.step == previous.step:
            where = "before the first step" if end.step is None else f"after step {end.step}"
            return f"the run failed {where} again"
        soon = self._clock() - self._started_at < _SOON_SECONDS
        if soon and end.rank is not None and end.rank == previous.rank:
            return f"rank {end.rank} failed again within {_SOON_SECONDS:.0f} s"
        return ""

    def _why_useless(self, end: RunEnd, previous: RunEnd | None) -> str:
        """Return why a restart cannot fix a failure; empty if it might."""
        cause = end.reported_cause
        if cause == Cause.REFUSED or (end.kind is EndKind.RANK and end.status == EXIT_REFUSED):
            return "the configuration was rejected, and would be rejected again"
        if end.kind is EndKind.NO_AGENT and previous is None:
            return "nothing has run yet; the messages above say why"
        if cause == Cause.DISK_FULL:
            return "a disk is full; free some space, and start the run again"
        if cause == Cause.NO_CHECKPOINT and previous is not None and previous.reported_cause == cause:
            return "all checkpoints were found damaged for the second time"
        if cause == Cause.NOT_FINITE:
            if end.step in self._not_finite:
                return f"the loss or gradient norm of step {end.step} was not finite for the second time"
            self._not_finite.add(end.step)
        return ""


def _pause_after(repeats: int, longest: float) -> float:
    """Return the pause in seconds, which doubles with each repetition up to the longest one."""
    return min(_FIRST_PAUSE * 2 ** min(repeats, _MOST_DOUBLINGS), longest)
