"""Result of a check that may replace settings of the configuration."""

from __future__ import annotations

from dataclasses import dataclass

from neox.config import NeoXConfig
from neox.problems import Problem


@dataclass(frozen=True)
class DecidedConfig:
    """A configuration with settings that were decided by what is on disk.

    Attributes:
        config: The configuration; the given one if there was nothing to decide.
        notes: Notes on what was decided.
        problems: Why something cannot be decided.
    """

    config: NeoXConfig
    notes: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()
