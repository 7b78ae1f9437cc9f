"""Documents, rows of texts, bad inputs, and the limit on bad inputs that are skipped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from neox.errors import DataError

BAD_ROW = b"\x18"
"""First byte of a line that stands for a bad row of a table, followed by the reason. No JSON starts with it."""
NOT_UTF_8 = "its text is not UTF-8"
"""Reason of a bad row."""


class CorruptInput(Exception):
    """The stream is truncated or damaged. The message says how."""


class TextRows(NamedTuple):
    """Rows of a table with one column of texts.

    Attributes:
        column: Name of the column.
        data: Texts as UTF-8, one after another, as the table holds them.
        lengths: Number of bytes of each text; -1 for null.
    """

    column: str
    data: memoryview
    lengths: list[int]

    @property
    def size(self) -> int:
        """Size of the rows for positions, counted as if each row ended with a newline."""
        return len(self.data) + len(self.lengths)

    def split(self, rows: int) -> tuple[TextRows, TextRows]:
        """Return the first rows, and the others."""
        first = self.lengths[:rows]
        size = sum(filter(_is_text, first))
        others = self._replace(data=self.data[size:], lengths=self.lengths[rows:])
        return self._replace(data=self.data[:size], lengths=first), others

    def texts(self) -> Iterator[memoryview | None]:
        """Yield the bytes of each text; None for null."""
        begin = 0
        for length in self.lengths:
            if _is_text(length):
                yield self.data[begin : begin + length]
                begin += length
            else:
                yield None


def _is_text(length: int) -> bool:
    return length >= 0


@dataclass(frozen=True)
class Document:
    """Text and its metadata, a JSON object as in the Pile."""

    text: str
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class BadInput:
    """Part of an input that is not a document.

    Attributes:
        file: Path of the input.
        line: Number of the line, from 1 (of the document in formats without lines); None for the whole file.
        offset: Number of bytes before the line, after decompression; None for the whole file.
        reason: The defect.
    """

    file: str
    line: int | None
    offset: int | None
    reason: str

    def __str__(self) -> str:
        location = self.file
        if self.line is not None:
            location += f":{self.line}"
        if self.offset is not None:
            location += f" (byte {self.offset})"
        return f"{location}: {self.reason}"


class SkipBudget:
    """Counter of skipped bad inputs, with a limit.

    Attributes:
        limit: Number of bad inputs that may be skipped. None means 0 for a caller that has no flag to raise it.
        report: Function that is called with each skipped input.
        skipped: Number of inputs skipped so far.
    """

    def __init__(
        self, limit: int | None = 0, report: Callable[[BadInput], None] | None = None, *, skipped: int = 0
    ) -> None:
        self.limit = limit
        self.report = report
        self.skipped = skipped

    def add(self, bad: BadInput) -> None:
        """Count a bad input. Raises DataError, with its location, if the limit is exceeded."""
        if self.skipped >= (self.limit or 0):
            message = str(bad)
            if self.limit:
                message += f" (after skipping {self.skipped:,})"
            message += ". Repair or remove it"
            if self.limit is not None:
                message += f", or allow more with --skip-bad {self.skipped + 1}"
            raise DataError(message)
        self.skipped += 1
        if self.report is not None:
            self.report(bad)
