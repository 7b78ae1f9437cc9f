"""Decisions of a start: what it chooses from the configuration and from facts on disks and hosts. No torch at import.

Each function takes the configuration as the user wrote it, facts, and what was decided before, and returns `Decided`.
The decisions are applied once (`neox.config.apply_decisions`); then configuration and plan are constants.
"""

from neox.config import Decision, apply_decisions
from neox.decisions.decided import Decided

__all__ = ["Decided", "Decision", "apply_decisions"]
