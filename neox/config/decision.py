"""`Decision`: a setting that a start chooses from what it finds on disks and hosts, with the reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

from neox.config.neox_config import NeoXConfig
from neox.problems import Problem, Source


@dataclass(frozen=True)
class Decision:
    """A setting of one start.

    Attributes:
        key: Flat key, or dotted path into a block.
        value: New value, of JSON types; None leaves the key at its default.
        reason: Why, as a sentence for people. Decisions that belong together have the same reason.
        source: Source of the setting that asked for it.
    """

    key: str
    value: Any
    reason: str
    source: Source

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Decision:
        """Return the decision that `to_json` encoded."""
        return cls(**{**data, "source": Source.from_json(data["source"])})

    def to_json(self) -> dict[str, Any]:
        """Return the decision as JSON values."""
        return {"key": self.key, "value": self.value, "reason": self.reason, "source": self.source.to_json()}


@dataclass(frozen=True)
class Decided:
    """Decisions about one topic, or why it cannot be decided.

    Attributes:
        decisions: The decisions, in the order in which they are applied.
        notes: Messages for people: reasons that they should know, and what else was found.
        problems: Why something cannot be decided.
    """

    decisions: tuple[Decision, ...] = ()
    notes: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()

    @property
    def values(self) -> dict[str, Any]:
        """New values by key; None for a key that is left at its default."""
        return {decision.key: decision.value for decision in self.decisions}

    def __add__(self, later: Decided) -> Decided:
        """Return both, this one first."""
        return Decided(
            (*self.decisions, *later.decisions), (*self.notes, *later.notes), (*self.problems, *later.problems)
        )


NOTHING = Decided()


def apply_decisions(config: NeoXConfig, decisions: Sequence[Decision]) -> NeoXConfig:
    """Return the configuration of a start: what the user asked for with all decisions, which are applied in order.

    A start calls this once. Afterwards the configuration does not change.
    """
    if not decisions:
        return config
    given = config.to_flat()
    changes: dict[str, Any] = {}
    sources: dict[str, Source] = {}
    for decision in decisions:
        key, *inner = decision.key.split(".")
        sources[key] = replace(decision.source, decided=True)
        if not inner:
            changes[key] = decision.value
            continue
        block = changes.setdefault(key, deepcopy(given.get(key) or {}))
        for name in inner[:-1]:
            block = block.setdefault(name, {})
        block[inner[-1]] = decision.value
    unset = [key for key, value in changes.items() if value is None]
    for key in unset:
        del changes[key], sources[key]
    return config.updated(changes, without=unset, source=sources)
