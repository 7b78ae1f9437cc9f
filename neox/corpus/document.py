"""Documents, bad inputs, and the number of bad inputs that may be skipped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from neox.errors import DataError


class CorruptInput(Exception):
    """Stream that is truncated or damaged; the message says which."""


@dataclass(frozen=True)
class Document:
    """Text with its metadata, a JSON object as in the Pile."""

    text: str
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class BadInput:
    """Part of an input that is no document.

    Attributes:
        file: Path of the input.
        line: Number of the line from 1 (in formats without lines, of the document); None for the whole file.
        offset: Byte, after decompression, where the line starts; None for the whole file.
        reason: Why it is bad.
    """

    file: str
    line: int | None
    offset: int | None
    reason: str

    def __str__(self) -> str:
        location = self.file if self.line is None else f"{self.file}:{self.line} (byte {self.offset})"
        return f"{location}: {self.reason}"


class SkipBudget:
    """Number of bad inputs that may be skipped.

    Attributes:
        limit: How many may be skipped; None means 0, where no flag allows more.
        report: Called with each bad input that is skipped.
        skipped: How many were skipped.
    """

    def __init__(
        self, limit: int | None = 0, report: Callable[[BadInput], None] | None = None, *, skipped: int = 0
    ) -> None:
        self.limit, self.report, self.skipped = limit, report, skipped

    def add(self, bad: BadInput) -> None:
        """Count a bad input. Raises DataError with its location if the limit is exceeded."""
        if self.skipped >= (self.limit or 0):
            after = f" (after skipping {self.skipped:,})" if self.limit else ""
            more = "" if self.limit is None else f", or allow more with --skip-bad {self.skipped + 1}"
            raise DataError(f"{bad}{after}. Repair or remove it{more}")
        self.skipped += 1
        if self.report is not None:
            self.report(bad)
