"""Lines for people: a logger per module, and progress that suits a terminal or a log file."""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TextIO

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_BYTES_PER_MB = 1e6
_MAX_REMEMBERED_LINES = 100


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module (`get_logger(__name__)`)."""
    return logging.getLogger(name)


def setup_logging(rank: int = 0, level: int = logging.INFO) -> None:
    """Send `neox` log lines to stderr; ranks other than 0 show warnings and worse, with their rank in front."""
    prefix = ""
    if rank != 0:
        prefix = f"[rank {rank}] "
        level = logging.WARNING
    handler = _StderrHandler()
    handler.setFormatter(logging.Formatter(prefix + _FORMAT, datefmt="%H:%M:%S"))
    root = logging.getLogger("neox")
    root.handlers[:] = [handler]
    root.setLevel(level)
    root.propagate = False


def shown_lines() -> list[str]:
    """Return the last log lines of this process, without their time."""
    for handler in logging.getLogger("neox").handlers:
        if isinstance(handler, _StderrHandler):
            return list(handler.lines)
    return []


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Handler that writes to stderr, and remembers the last lines."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.lines: deque[str] = deque(maxlen=_MAX_REMEMBERED_LINES)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.name}: {record.getMessage()}")
        super().emit(record)


class Progress(Protocol):
    """What `progress` yields: a counter of finished units."""

    def update(self, n: float = 1) -> Any:
        """Count `n` more units as done."""


def _readable(rate: float) -> str:
    """Format a rate for display: 4.7, 35,913, 34.9 million."""
    if rate >= 1e6:
        return f"{rate / 1e6:,.1f} million"
    if rate >= 1000:
        return f"{rate:,.0f}"
    return f"{rate:,.1f}"


class _LineProgress:
    """Progress as plain lines for logs: at most one line every `every` seconds, and one at the end.

    Bytes (`unit="B"`) are shown in MB.
    """

    def __init__(self, description: str, total: float | None, unit: str, every: float) -> None:
        self.description = description
        self.total = total
        self.unit = unit
        self.every = every
        self.done = 0.0
        self.started = time.monotonic()
        self.last_line = self.started

    def update(self, n: float = 1) -> None:
        self.done += n
        now = time.monotonic()
        if now - self.last_line >= self.every:
            self.last_line = now
            self.print_line()

    def print_line(self) -> None:
        seconds = max(time.monotonic() - self.started, 1e-9)
        rate = self.done / seconds
        text = f"{self.description}: "
        if self.total:
            percent = min(100, 100 * self.done / self.total)  # a small table is read by its parts, some of them twice
            text += f"{self._number(self.done)} of {self._amount(self.total)} ({percent:.0f} %)"
        else:
            text += self._amount(self.done)
        if self.total and 0 < self.done < self.total:
            text += f", ETA {(self.total - self.done) / rate:,.0f} s"
        if self.unit == "B":
            text += f", {rate / _BYTES_PER_MB:,.1f} MB/s"
        elif self.unit != "s":
            text += f", {_readable(rate)} {self.unit}/s"
        print(text, file=sys.stderr, flush=True)

    def _number(self, count: float) -> str:
        """Return a count for the line, in MB if the unit is a byte."""
        if self.unit == "B":
            return f"{count / _BYTES_PER_MB:,.1f}"
        return f"{count:,.0f}"

    def _amount(self, count: float) -> str:
        """Return a count with its unit."""
        unit = "MB" if self.unit == "B" else self.unit
        return f"{self._number(count)} {unit}"


@contextmanager
def progress(description: str, total: float | None = None, unit: str = "it", every: float = 10.0) -> Iterator[Progress]:
    """Show progress on stderr: a tqdm bar on a terminal, plain lines elsewhere.

    Args:
        description: Name of the work, in front of the numbers.
        total: Number of units of the whole work; None if it is not known.
        unit: Name of the unit that `total` and `update` count; bytes ("B") are shown in MB.
        every: Seconds between two plain lines.

    Yields:
        The counter to update.
    """
    if sys.stderr.isatty():
        from tqdm import tqdm  # its import takes a tenth of the time of a dry run, which shows no progress

        with tqdm(desc=description, total=total, unit=unit, unit_scale=True, file=sys.stderr) as bar:
            yield bar
        return
    lines = _LineProgress(description, total, unit, every)
    try:
        yield lines
    finally:
        lines.print_line()
