"""A document, and how an input that is not one is named and counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from neox.errors import DataError


class CorruptInput(Exception):
    """A stream that ends early or whose bytes are damaged; the message says which."""


@dataclass(frozen=True)
class Document:
    """One text with what its corpus says about it (`meta` as in the Pile: a JSON object)."""

    text: str
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class BadInput:
    """Something in an input that is not a document.

    line: from 1; in formats without lines the number of the document. offset: byte where the line starts, after
    decompression. Both are None where the whole file is meant.
    """

    file: str
    line: int | None
    offset: int | None
    reason: str

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}:{self.line} (byte {self.offset})"
        return f"{place}: {self.reason}"


class SkipBudget:
    """Count bad inputs; the one beyond the limit is a DataError that places it and names the way on.

    limit: how many may be skipped (0: stop at the first; None: the same, where no flag allows more). report: called
    with each bad input that is skipped.
    """

    def __init__(
        self, limit: int | None = 0, report: Callable[[BadInput], None] | None = None, *, skipped: int = 0
    ) -> None:
        self.limit, self.report, self.skipped = limit, report, skipped

    def add(self, bad: BadInput) -> None:
        """Count one; raise DataError if the limit is passed."""
        if self.skipped >= (self.limit or 0):
            after = f" (after skipping {self.skipped:,})" if self.limit else ""
            more = "" if self.limit is None else f", or allow more with --skip-bad {self.skipped + 1}"
            raise DataError(f"{bad}{after}. Repair or remove it{more}")
        self.skipped += 1
        if self.report is not None:
            self.report(bad)
