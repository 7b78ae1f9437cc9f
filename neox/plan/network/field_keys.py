"""How fields of `Architecture` are read from YAML keys, and written as keys: the form of the tables' rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from neox.architecture import Architecture

Keys = Mapping[str, Any]


def inexpressible(_: Architecture) -> Keys:
    """Write nothing: the field has its default in every network that is written as keys."""
    return {}


@dataclass(frozen=True)
class FieldKeys:
    """How one field of `Architecture` is read from YAML keys, and written as keys.

    Attributes:
        keys: Keys that the field follows from.
        read: Values of `keys`, in this order -> the field's value.
        write: Network -> the keys that this field adds. Keys that would have their default anyway may be left out.
        later: Those of `keys` that did not exist yet when older checkpoints were written; they had their defaults.
    """

    keys: tuple[str, ...]
    read: Callable[..., Any]
    write: Callable[[Architecture], Keys] = inexpressible
    later: tuple[str, ...] = ()

    @property
    def needed(self) -> tuple[str, ...]:
        """Keys without which a checkpoint says nothing about the field."""
        return tuple(key for key in self.keys if key not in self.later)


def same(value: Any) -> Any:
    """Return a key's value as the field's value."""
    return value


def copied(key: str) -> FieldKeys:
    """Return the row of a field that is the value of a key of the same name."""
    return FieldKeys((key,), same, lambda network: {key: getattr(network, key)})


def keys_if(condition: bool, **keys: Any) -> Keys:
    """Return keys with their values if a condition holds, else nothing."""
    return keys if condition else {}


def unless_default(key: str, value: Any, default: Any) -> Keys:
    """Return a key with its value, or nothing if that is the key's default."""
    return keys_if(value != default, **{key: value})


def read_if(condition: Callable[[Any], bool], absent: Any, read: Callable[..., Any] = same) -> Callable[..., Any]:
    """Return a function that reads a field which networks have only under a condition.

    Args:
        condition: Value of the first key -> whether the network has the field.
        absent: Value of the field in other networks.
        read: Values of the other keys -> the field's value.
    """

    def read_field(first: Any, *others: Any) -> Any:
        if condition(first):
            return read(*others)
        return absent

    return read_field


def later_key(key: str, absent: Any) -> FieldKeys:
    """Return the row of a field with the name of a key that older checkpoints lack.

    Args:
        key: The key.
        absent: Value of the field without the key.
    """

    def read(value: Any) -> Any:
        return absent if value is None else value

    def write(network: Architecture) -> Keys:
        return unless_default(key, getattr(network, key), absent)

    return FieldKeys((key,), read, write, later=(key,))
