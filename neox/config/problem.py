"""One thing that is wrong with the keys of a configuration, and the keys about which nothing more can be said then."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


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


def _whole_list(path: str) -> str:
    *parents, last = path.split(".")
    return _whole_list(".".join(parents)) if last.isdecimal() and parents else path
