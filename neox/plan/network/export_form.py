"""Hugging Face families that can express the network of a configuration, and why others cannot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from neox.architecture import Architecture
from neox.config import NeoXConfig
from neox.families import FAMILIES, Family
from neox.plan.network.architecture import architecture_keys


def exported_norm(norm: str) -> str:
    """Return the norm of an export for a value of `norm`.

    gpt-neox's RMS norm had its epsilon outside of the root until May 2025. No Hugging Face norm has that, and
    gpt-neox's own converter writes such models as if it was inside.
    """
    return "rmsnorm" if norm == "rmsnorm_v2.0" else norm


@dataclass(frozen=True)
class FamilyRefusal:
    """A family that cannot express a network.

    Attributes:
        family: The family.
        problems: Field of the architecture -> why the family cannot express its value.
    """

    family: Family
    problems: Mapping[str, str]

    def describe(self, config: NeoXConfig) -> str:
        """Return the reasons with the YAML settings that they follow from, each setting once."""
        reasons: dict[str, str] = {}
        for field, reason in self.problems.items():
            reasons.setdefault(_setting(config, field), reason)
        settings = "; ".join(f"`{setting}`: {reason}" for setting, reason in reasons.items())
        return f"{self.family.title} ({self.family.model_type}) cannot express {settings}"


def family_refusals(architecture: Architecture, families: Iterable[Family]) -> list[FamilyRefusal]:
    """Return why families cannot express a network, the closest one first; nothing if one of them can."""
    refusals = []
    for family in families:
        problems = family.inexpressible_fields(architecture)
        if not problems:
            return []
        refusals.append(FamilyRefusal(family, problems))
    return sorted(refusals, key=lambda refusal: len(refusal.problems))


def export_note(config: NeoXConfig, architecture: Architecture) -> str | None:
    """Return a note if no Hugging Face family can express a network, so that an export would be refused."""
    exported = replace(architecture, norm=exported_norm(architecture.norm))
    refusals = family_refusals(exported, FAMILIES.values())
    if not refusals:
        return None
    closest = refusals[0].describe(config)
    return f"no Hugging Face model has this network: it trains, but an export is refused; the closest, {closest}"


def _setting(config: NeoXConfig, field: str) -> str:
    """Return the YAML keys that a field of the architecture follows from, with their values."""
    keys = architecture_keys(field)
    given = [key for key in keys if config.given(key)] or keys[:1]
    return ", ".join(f"{key}: {config.value(key)}" for key in given) or field
