"""Problems and notes about a configuration, and sources of its settings: values until they are printed."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any


class SourceKind(Enum):
    """What gave a setting its value."""

    FILE = "file"
    COMMAND_LINE = "command line"
    CHECKPOINT = "checkpoint"
    DEFAULT = "default"
    CODE = "code"


@dataclass(frozen=True)
class Source:
    """The place that gave a setting its value.

    Attributes:
        kind: Kind of the place.
        file: Name of the file or checkpoint; empty for other kinds.
        line: Line of the file, from 1; 0 for the whole file.
        replaces: Place in an earlier file whose value this one replaces.
        rule: Key or value from which this value was derived; empty if it stands there as it is.
        dropped: Settings inside the replaced block that this value leaves out, as `path: value`.
        decided: Whether a start has decided the value, which the setting at the place led to.
    """

    kind: SourceKind
    file: str = ""
    line: int = 0
    replaces: Source | None = None
    rule: str = ""
    dropped: tuple[str, ...] = ()
    decided: bool = False

    @classmethod
    def in_file(
        cls, file: str, line: int = 0, *, replaces: Source | None = None, dropped: tuple[str, ...] = ()
    ) -> Source:
        """Return a line of a file, or the whole file."""
        return cls(SourceKind.FILE, file, line, replaces, dropped=dropped)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Source:
        """Return the source that `to_json` encoded."""
        values = {**data, "kind": SourceKind(data["kind"])}
        if "replaces" in data:
            values["replaces"] = cls.from_json(data["replaces"])
        if "dropped" in data:
            values["dropped"] = tuple(data["dropped"])
        return cls(**values)

    def to_json(self) -> dict[str, Any]:
        """Return the source as JSON values, without empty ones."""
        data: dict[str, Any] = {"kind": self.kind.value}
        if self.file:
            data["file"] = self.file
        if self.line:
            data["line"] = self.line
        if self.replaces is not None:
            data["replaces"] = self.replaces.to_json()
        if self.rule:
            data["rule"] = self.rule
        if self.dropped:
            data["dropped"] = list(self.dropped)
        if self.decided:
            data["decided"] = True
        return data

    @property
    def is_place(self) -> bool:
        """Whether a user can go there: a file, a checkpoint or the command line."""
        return self.kind not in (SourceKind.DEFAULT, SourceKind.CODE)

    @property
    def is_command_line(self) -> bool:
        """Whether a flag or `--set` gave the value."""
        return self.kind is SourceKind.COMMAND_LINE

    @property
    def is_default(self) -> bool:
        """Whether the key was left at its default."""
        return self.kind is SourceKind.DEFAULT

    def derived(self, rule: str) -> Source:
        """Return the source of a value that follows from the one given here, by a key or value named `rule`."""
        return replace(self, rule=rule)

    def __str__(self) -> str:
        text = self._place()
        if self.replaces is not None:
            text += f" (replacing {self.replaces})"
        if self.rule:
            text += f" ({self.rule})"
        return text

    def _place(self) -> str:
        if self.kind is SourceKind.COMMAND_LINE:
            return "--set"
        if self.kind is SourceKind.DEFAULT:
            return "default"
        if self.kind is SourceKind.CODE:
            return "given"
        if not self.line:
            return self.file
        return f"{self.file}:{self.line}"


COMMAND_LINE = Source(SourceKind.COMMAND_LINE)
"""Source of what flags and `--set` give."""
DEFAULT = Source(SourceKind.DEFAULT)
"""Source of what nobody gave."""
CODE = Source(SourceKind.CODE)
"""Source of what a caller gave without saying where it comes from."""


@dataclass(frozen=True)
class Finding:
    """Something about a configuration that a user should know.

    Attributes:
        keys: Dotted paths of all settings that it depends on, the one to look at first.
        message: The finding, without the place.
        source: Where to look.
    """

    keys: tuple[str, ...]
    message: str
    source: Source = CODE

    def concerns(self, paths: Collection[str]) -> bool:
        """Whether it depends on one of some dotted paths, or on a key inside or around one."""
        return any(_overlap(key, path) for key in self.keys for path in paths)

    def __str__(self) -> str:
        if not self.source.is_place:
            return self.message
        return f"{self.source}: {self.message}"


class Problem(Finding):
    """Something wrong with a configuration; its message also says what to do."""


class Missing(Problem):
    """Something that a start needs and that is not given yet, or not on this machine; a plan can do without it."""

    @classmethod
    def of(cls, problems: Iterable[Problem]) -> list[Problem]:
        """Return problems as such ones."""
        return [cls(problem.keys, problem.message, problem.source) for problem in problems]


class Note(Finding):
    """Something about a configuration that works, such as a key without effect."""


def in_file_order(problems: Iterable[Problem]) -> list[Problem]:
    """Sort problems by line, with the files in the order of their first problem; those outside of files come last."""
    files: dict[str, int] = {}

    def position(problem: Problem) -> tuple[int, int]:
        source = problem.source
        if source.kind is not SourceKind.FILE:
            return sys.maxsize, 0
        return files.setdefault(source.file, len(files)), source.line

    return sorted(problems, key=position)


def _overlap(one: str, other: str) -> bool:
    """Return whether two dotted paths are the same, or one is inside the other."""
    return one == other or one.startswith(f"{other}.") or other.startswith(f"{one}.")
