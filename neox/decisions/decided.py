"""`Decided`: the result of each function that decides something for a start."""

from __future__ import annotations

from dataclasses import dataclass

from neox.config import Decision
from neox.problems import Problem


@dataclass(frozen=True)
class Decided:
    """Decisions about one topic, or why it cannot be decided.

    Attributes:
        decisions: The decisions, in the order in which they are applied.
        notes: Notes besides the reasons of the decisions.
        problems: Why something cannot be decided.
    """

    decisions: tuple[Decision, ...] = ()
    notes: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()
