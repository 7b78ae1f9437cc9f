"""What is known of a key of gpt-neox that belongs to no section here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Since = Literal["v2.0", "later"]
Status = Literal["refused", "dormant", "no effect"]


@dataclass(frozen=True)
class UnsupportedKey:
    """One such key: `default` is gpt-neox's, under which (or None) the feature is off."""

    name: str
    type: str
    default: Any
    section: str
    since: Since
    status: Status
    reason: str

    def is_off(self, value: Any) -> bool:
        """Whether a value asks for nothing: gpt-neox's default, None, or a block that is empty or not enabled."""
        if value is None or value == self.default:
            return True
        return self.type == "dict" and isinstance(value, Mapping) and not value.get("enabled", bool(value))


def keys(
    section: str, since: Since, status: Status, reason: str, *keys: tuple[str, str, Any]
) -> Iterator[UnsupportedKey]:
    """Yield keys that share a section, a status and a reason; each is (name, type, gpt-neox's default)."""
    for name, kind, default in keys:
        yield UnsupportedKey(name, kind, default, section, since, status, reason)
