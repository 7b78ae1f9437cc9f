"""A feature of a training on paper: its rules, what the plan says of it, and how a measured run does without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from neox.config.neox_config import NeoXConfig
from neox.problems import Note, Problem

NO_SAVES = "no checkpoint is saved before the last step; give checkpoint_factor"
"""Reason of the notes for a run that saves no checkpoint between its first and its last step."""


def _nothing(config: NeoXConfig) -> Iterator[str]:
    yield from ()


def _no_problems(config: NeoXConfig) -> Iterator[Problem]:
    yield from ()


def _no_notes(config: NeoXConfig) -> Iterator[Note]:
    yield from ()


@dataclass(frozen=True)
class FeaturePaper:
    """The half of a feature that needs no torch (`neox/features/NAME/paper.py`).

    Attributes:
        problems: Rules across keys that a configuration breaks. Conditions of one key stand at the key.
        notes_without_saves: Notes for a run that saves no checkpoint between its first and its last step.
        plan_lines: Lines of the plan under `label`.
        recovery_lines: Lines of the plan about what happens after a failure.
        label: Label of the plan's lines.
        off: Overrides with which a measured run does without the feature.
    """

    problems: Callable[[NeoXConfig], Iterator[Problem]] = _no_problems
    notes_without_saves: Callable[[NeoXConfig], Iterator[Note]] = _no_notes
    plan_lines: Callable[[NeoXConfig], Iterator[str]] = _nothing
    recovery_lines: Callable[[NeoXConfig], Iterator[str]] = _nothing
    label: str = ""
    off: tuple[str, ...] = ()
