"""One thing that is wrong with the keys of a configuration, and the keys about which nothing more can be said then."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import NamedTuple

_PLACE = re.compile(r"(?P<file>[^\n]*?):(?P<line>\d+): ")


class Problem(NamedTuple):
    """text: one complete sentence; about: dotted paths whose value is in doubt, those that may have been meant too."""

    text: str
    about: tuple[str, ...] = ()


def texts(problems: Iterable[Problem]) -> list[str]:
    """Return the sentences alone."""
    return [problem.text for problem in problems]


def doubtful(problems: Iterable[Problem]) -> frozenset[str]:
    """Return every path that a problem is about; an item of a list (`betas.1`) stands for the list."""
    return frozenset(_whole_list(path) for problem in problems for path in problem.about)


def in_file_order(problems: Iterable[str]) -> list[str]:
    """Return sentences that begin with `file:line: ` by line, each file's where its first stands; the others last."""
    files: dict[str, int] = {}

    def place(problem: str) -> tuple[int, int]:
        match = _PLACE.match(problem)
        if match is None:
            return (sys.maxsize, 0)
        return files.setdefault(match["file"], len(files)), int(match["line"])

    return sorted(problems, key=place)


def _whole_list(path: str) -> str:
    *parents, last = path.split(".")
    return _whole_list(".".join(parents)) if last.isdecimal() and parents else path
