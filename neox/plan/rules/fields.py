"""Rules that stand at the fields themselves: what a field requires, excludes, or has no effect without."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from neox.config.neox_config import NeoXConfig, section_classes
from neox.config.sections.conditions import (
    Condition,
    Excludes,
    OnlyWith,
    Refused,
    Requires,
    Values,
    any_of,
    effect_conditions,
    markers,
)
from neox.problems import Note, Problem


@dataclass(frozen=True)
class _Given:
    """A field with the value that it was given, or that a given block has for it.

    Attributes:
        path: Dotted path.
        info: The field.
        value: The value.
        is_default: Whether the value is the default.
    """

    path: str
    info: FieldInfo
    value: Any
    is_default: bool

    def is_on(self, when: Values) -> bool:
        """Whether its value is one of some values; without any, whether it asks for something beyond the default."""
        if when:
            return self.value in when
        is_number = isinstance(self.value, int | float) and not isinstance(self.value, bool)
        return not self.is_default and (is_number or bool(self.value))


def field_problems(config: NeoXConfig) -> Iterator[Problem]:
    """Yield the problems of fields that do not work, require a key that is off, or exclude one that is on."""
    for given in _given_fields(config):
        yield from _refusals(config, given)
        if _has_effect(config, given):
            yield from _requirements(config, given)
            yield from _exclusions(config, given)


def idle_notes(config: NeoXConfig) -> Iterator[Note]:
    """Yield a note for each set of conditions that are off though keys were given that need one of them."""
    idle: dict[tuple[OnlyWith, ...], list[str]] = {}
    for given in _given_fields(config):
        if not given.is_default and not _has_effect(config, given):
            idle.setdefault(effect_conditions(given.info), []).append(given.path)
    for conditions, keys in idle.items():
        settings = ", ".join(map(config.describe_setting, keys))
        verb = "has" if len(keys) == 1 else "have"
        yield Note(tuple(keys), f"{settings} {verb} no effect: only with {any_of(conditions)}")


def _refusals(config: NeoXConfig, given: _Given) -> Iterator[Problem]:
    for refused in markers(given.info, Refused):
        if given.is_on(refused.when):
            yield config.problem(given.path, refused.reason)


def _requirements(config: NeoXConfig, given: _Given) -> Iterator[Problem]:
    """Yield one problem for all missing keys that have the same remedy."""
    missing: dict[str, list[Requires]] = {}
    for needed in markers(given.info, Requires):
        if given.is_on(needed.when) and not _is_on(config, needed, given.path):
            missing.setdefault(needed.advice, []).append(needed)
    for advice, needs in missing.items():
        keys = [needed.path(given.path) for needed in needs]
        rule = f"needs {' and '.join(map(str, needs))}"
        stated = [config.describe_setting(key) for key in keys if config.given(key)]
        if stated:
            rule += f", not {' and '.join(stated)}"
        yield config.problem(given.path, f"{rule}; {advice}", *keys)


def _exclusions(config: NeoXConfig, given: _Given) -> Iterator[Problem]:
    for excluded in markers(given.info, Excludes):
        if not given.is_on(excluded.when) or not _is_on(config, excluded, given.path):
            continue
        key = excluded.path(given.path)
        rule = f"does not work with {config.describe_setting(key)}"
        if excluded.reason:
            rule += f": {excluded.reason}"
        yield config.problem(given.path, f"{rule}; {excluded.advice}", key)


def _has_effect(config: NeoXConfig, given: _Given) -> bool:
    conditions = effect_conditions(given.info)
    return not conditions or any(_is_on(config, condition, given.path) for condition in conditions)


def _is_on(config: NeoXConfig, condition: Condition, field: str) -> bool:
    return condition.is_on(config.value(condition.path(field)))


def _given_fields(config: NeoXConfig) -> Iterator[_Given]:
    """Yield the fields that were given, and all fields of the blocks that were given."""
    for section in section_classes():
        keys = getattr(config, section)
        for key in sorted(keys.model_fields_set):
            yield from _fields_of(keys, key, key)


def _fields_of(block: BaseModel, key: str, path: str) -> Iterator[_Given]:
    """Yield a field of a block, and the fields of the block that is its value, if one is."""
    info = type(block).model_fields[key]
    value = getattr(block, key)
    yield _Given(path, info, value, value == info.get_default(call_default_factory=True))
    if isinstance(value, BaseModel):
        for inner in type(value).model_fields:
            yield from _fields_of(value, inner, f"{path}.{inner}")
