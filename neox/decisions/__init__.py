"""Decisions of a start: what it chooses from the configuration and from facts on disks and hosts. No torch at import.

`start.decide_start` has the order. Each function takes the configuration as the user wrote it, facts, and what was
decided before, and returns `Decided`. The decisions are applied once (`apply_decisions`); then configuration and plan
are constants.
"""

from neox.config import NOTHING, Decided, Decision, apply_decisions

__all__ = ["NOTHING", "Decided", "Decision", "apply_decisions"]
