"""How the ranks of one host get on, as their agent sees it: the file they touch, logs, their answers to a signal."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from neox.launch.rendezvous import answer_path, busy_path

# Nothing may be left ten seconds after a signal: half of them are for the end itself, on a busy machine.
ANSWER_SECONDS = 5.0


class RankActivity:
    """Times at which ranks reported progress (`report_progress`), printed, or answered a signal."""

    def __init__(self, file: Path, log_dir: Path) -> None:
        self.file, self.log_dir = file, log_dir
        self.started = time.time()
        self._reported = 0.0
        self._longest = 0.0

    def look(self) -> None:
        """Notice a report; called many times a second."""
        with contextlib.suppress(OSError):
            now = self.file.stat().st_mtime
            if self._reported:
                self._longest = max(self._longest, now - self._reported)
            self._reported = now

    def last(self) -> float:
        """When a rank last got on or printed, seconds since the epoch."""
        times = [self.started]
        for path in (self.file, *self.log_dir.glob("rank_*.log")):
            with contextlib.suppress(OSError):
                times.append(path.stat().st_mtime)
        return max(times)

    def patience(self) -> float:
        """Seconds in which a rank that is well answers a signal: Python does so between two steps of its own, so where
        a training step is long, and the last one not long ago, twice the longest time between two reports."""
        return max(ANSWER_SECONDS, self._reported + 2 * self._longest - time.time())

    def answered(self, rank: int) -> bool:
        """Whether a rank said that it heard the signal and is ending by itself (`acknowledge_stop`), or is where it may
        not hear one yet (`busy_saving`)."""
        return answer_path(self.file, rank).exists() or busy_path(self.file, rank).exists()
