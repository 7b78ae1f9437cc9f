"""Markers of fields, in `Annotated`: what else must be given, or must not be, for a field to work.

`neox.plan.rules.fields` checks them, and the reference page shows them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic.fields import FieldInfo

Values = tuple[Any, ...]
Marker = TypeVar("Marker")


@dataclass(frozen=True)
class Condition:
    """A state of another key.

    Attributes:
        key: Dotted path of the key; with a dot in front, the name of a key in the same block.
        values: Values that count. If there are none, any value counts that is true, or above 0. If the key holds a
            list, one item is enough.
        above: If given, numbers above this count, and nothing else.
    """

    key: str
    values: Values = ()
    above: float | None = None

    def is_on(self, value: Any) -> bool:
        """Whether a value of `key` counts."""
        if self.above is not None:
            return value is not None and value > self.above
        if not self.values:
            return bool(value)
        if isinstance(value, list | tuple):
            return any(self.is_on(item) for item in value)
        return value in self.values

    def path(self, field: str) -> str:
        """Return the dotted path of `key`, seen from a field with this dotted path."""
        if not self.key.startswith("."):
            return self.key
        block = field.rpartition(".")[0]
        return f"{block}{self.key}"

    def __str__(self) -> str:
        name = self.key.removeprefix(".")
        if self.above is not None:
            return f"`{name}` above {self.above:g}"
        if self.values == (None,):
            return f"`{name}` unset"
        if not self.values:
            return f"`{name}`"
        *others, last = map(str, self.values)
        values = f"{', '.join(others)} or {last}" if others else last
        return f"`{name}: {values}`"


@dataclass(frozen=True)
class OnlyWith(Condition):
    """Marks a field that has an effect only if another key is on."""


@dataclass(frozen=True)
class OnlyWithAny:
    """Marks a field that has an effect only if at least one of several keys is on."""

    keys: tuple[str, ...]


@dataclass(frozen=True)
class Requires(Condition):
    """Marks a field that works only if another key is on (several markers: if all are).

    Attributes:
        when: Values of the field that need it; without any, all values that switch something on.
        advice: What to do.
    """

    when: Values = ()
    advice: str = "remove it"


@dataclass(frozen=True)
class Excludes(Condition):
    """Marks a field that does not work if another key is on.

    Attributes:
        when: Values of the field that do not work; without any, all values that switch something on.
        reason: Why, as a clause; it may be empty.
        advice: What to do.
    """

    when: Values = ()
    reason: str = ""
    advice: str = "remove one of them"


@dataclass(frozen=True)
class Refused:
    """Marks a field that is known and does not work.

    Attributes:
        reason: Why, and what to do, as the rest of a sentence that begins with the setting.
        when: Values that do not work; without any, none works.
    """

    reason: str
    when: Values = ()


@dataclass(frozen=True)
class NoEffect:
    """Marks a field that is known and changes nothing here."""


def markers(info: FieldInfo, kind: type[Marker]) -> tuple[Marker, ...]:
    """Return the markers of one kind that a field has."""
    return tuple(item for item in info.metadata if isinstance(item, kind))


def effect_conditions(info: FieldInfo) -> tuple[OnlyWith, ...]:
    """Return the conditions one of which must hold for a field to have an effect; none if it always has one."""
    conditions = markers(info, OnlyWith)
    for marker in markers(info, OnlyWithAny):
        conditions += tuple(OnlyWith(key) for key in marker.keys)
    return conditions


def status_of(info: FieldInfo) -> str:
    """Return the status of a field: `works`, `refused` or `no effect`."""
    if markers(info, NoEffect):
        return "no effect"
    if any(not refusal.when for refusal in markers(info, Refused)):
        return "refused"
    return "works"


def any_of(conditions: Iterable[Condition]) -> str:
    """Return conditions as text, joined by `or`."""
    return " or ".join(map(str, conditions))


def in_words(info: FieldInfo) -> str:
    """Return sentences that say under which conditions a field works; nothing if it always does."""
    sentences = []
    if effect := effect_conditions(info):
        sentences.append(f"Only with {any_of(effect)}.")
    for values, needs in _by_values(markers(info, Requires)).items():
        sentences.append(_sentence(values, f"needs {' and '.join(needs)}."))
    for values, exclusions in _by_values(markers(info, Excludes)).items():
        sentences.append(_sentence(values, f"not with {' or '.join(exclusions)}."))
    return " ".join(sentences)


def _by_values(conditions: Iterable[Requires | Excludes]) -> dict[Values, list[str]]:
    """Return conditions as text, grouped by the values of the field that they apply to."""
    groups: dict[Values, list[str]] = {}
    for condition in conditions:
        groups.setdefault(condition.when, []).append(str(condition))
    return groups


def _sentence(values: Values, text: str) -> str:
    """Return a text about some values of a field, or about every value that switches something on, as a sentence."""
    if values in ((), (True,)):
        return text[:1].upper() + text[1:]
    named = ", ".join(f"`{value}`" for value in values)
    return f"{named}: {text}"
