"""Keys that change nothing because another one is off: said in the plan, so that no setting is ignored in silence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from neox.config.flat import key_sections
from neox.config.sections import NeoXConfig
from neox.config.sections.base import OnlyWith
from neox.config.wording import said


def switches_of(info: FieldInfo) -> tuple[OnlyWith, ...]:
    """Return the switches of a field, any of which gives it an effect; none: it always has one."""
    return tuple(item for item in info.metadata if isinstance(item, OnlyWith))


def only_with_text(switches: tuple[OnlyWith, ...]) -> str:
    """Return ` Only with ...` for documentation, nothing for a field without switches."""
    return f" Only with {_any_of(switches)}." if switches else ""


def idle_notes(config: NeoXConfig) -> list[str]:
    """Return a sentence for each set of switches that are off though keys which need one of them were given."""
    idle: dict[tuple[OnlyWith, ...], list[str]] = {}
    for path, info, value in _given_fields(config):
        switches = switches_of(info)
        if switches and not any(switch.is_on(value_at(config, switch.key)) for switch in switches):
            idle.setdefault(switches, []).append(said(config, path, value))
    return [
        f"{', '.join(keys)} {'has' if len(keys) == 1 else 'have'} no effect: only with {_any_of(switches)}"
        for switches, keys in idle.items()
    ]


def value_at(config: NeoXConfig, path: str) -> Any:
    """Return the value of a flat key or of a dotted path into a block; None where the block is unset."""
    key, *inner = path.split(".")
    value = getattr(getattr(config, key_sections(type(config))[key]), key)
    for name in inner:
        value = getattr(value, name, None)
    return value


def _given_fields(config: NeoXConfig) -> Iterator[tuple[str, FieldInfo, Any]]:
    """Yield path, field and value of every key that was given another value than its default."""
    for name in type(config).model_fields:
        yield from _given_in(getattr(config, name), "")


def _given_in(block: BaseModel, prefix: str) -> Iterator[tuple[str, FieldInfo, Any]]:
    for key in sorted(block.model_fields_set):
        info, value = type(block).model_fields[key], getattr(block, key)
        if isinstance(value, BaseModel):
            yield from _given_in(value, f"{prefix}{key}.")
        elif value != info.get_default(call_default_factory=True):
            yield f"{prefix}{key}", info, value


def _any_of(switches: tuple[OnlyWith, ...]) -> str:
    return " or ".join(map(str, switches))
