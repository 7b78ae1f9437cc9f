"""Lines for people: a logger per module, and progress that suits a terminal or a log file."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def get_logger(name: str) -> logging.Logger:
    """Return the logger of a module (`get_logger(__name__)`)."""
    return logging.getLogger(name)


def setup_logging(rank: int = 0, level: int = logging.INFO) -> None:
    """Send `neox` log lines to stderr; ranks other than 0 show warnings and worse, with their rank in front."""
    handler = logging.StreamHandler(sys.stderr)
    prefix = "" if rank == 0 else f"[rank {rank}] "
    handler.setFormatter(logging.Formatter(prefix + _FORMAT, datefmt="%H:%M:%S"))
    root = logging.getLogger("neox")
    root.handlers[:] = [handler]
    root.setLevel(level if rank == 0 else logging.WARNING)
    root.propagate = False


class Progress(Protocol):
    """What `progress` yields: something that counts."""

    def update(self, n: float = 1) -> Any:
        """Count `n` more units as done."""


class _LineProgress:
    """Progress as plain lines for logs: at most one line every `every` seconds, and one at the end."""

    def __init__(self, description: str, total: float | None, unit: str, every: float) -> None:
        self.description, self.total, self.unit, self.every = description, total, unit, every
        self.done = 0.0
        self.started = self.last = time.monotonic()

    def update(self, n: float = 1) -> None:
        self.done += n
        now = time.monotonic()
        if now - self.last >= self.every:
            self.last = now
            self.line()

    def line(self) -> None:
        seconds = max(time.monotonic() - self.started, 1e-9)
        rate = self.done / seconds
        text = f"{self.description}: {self.done:,.0f}"
        if self.total:
            text += f" of {self.total:,.0f} {self.unit} ({100 * self.done / self.total:.0f} %)"
            text += f", ETA {(self.total - self.done) / rate:,.0f} s" if self.done else ""
        else:
            text += f" {self.unit}"
        if self.unit != "s":
            text += f", {rate:,.1f} {self.unit}/s"
        print(text, file=sys.stderr, flush=True)


@contextmanager
def progress(description: str, total: float | None = None, unit: str = "it", every: float = 10.0) -> Iterator[Progress]:
    """Show progress on stderr: a tqdm bar on a terminal, a plain line every `every` seconds elsewhere.

    `total` and updates are in `unit`; with `unit="B"` a terminal shows scaled bytes.
    """
    if sys.stderr.isatty():
        from tqdm import tqdm  # a tenth of a dry run's time, which shows no progress

        with tqdm(desc=description, total=total, unit=unit, unit_scale=True, file=sys.stderr) as bar:
            yield bar
        return
    lines = _LineProgress(description, total, unit, every)
    try:
        yield lines
    finally:
        lines.line()
