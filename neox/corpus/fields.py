"""Fields of records: dotted paths, text templates, and filters by field values."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from neox.errors import ConfigError

Comparison = Literal["=", "!=", ">=", "<=", ">", "<", ".."]
_FILTER = re.compile(r"([^=!<>]+?)\s*(!=|>=|<=|=|>|<)(.*)", re.DOTALL)


class FieldError(Exception):
    """A record lacks a field, or the field has the wrong type.

    Attributes:
        field: The field.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


def look_up(record: Mapping[str, Any], key: str) -> Any:
    r"""Return the value of a key in a record.

    Args:
        record: JSON object.
        key: Name of a field; a dotted path (`meta.text`); or a template with fields in braces, such as
            `{title}\n\n{text}`, whose fields are texts or numbers.

    Raises:
        FieldError: If a field is missing, or a template's field is neither text nor a number.
    """
    if key in record:
        return record[key]
    if "{" not in key:
        value: Any = record
        for name in key.split("."):
            if not isinstance(value, dict) or name not in value:
                names = ", ".join(map(repr, list(record)[:8]))
                raise FieldError(key, f"no field {key!r} (the line has {names or 'none'})")
            value = value[name]
        return value
    texts = []
    for literal, field in template_parts(key):
        texts.append(literal)
        if field:
            value = look_up(record, field)
            if isinstance(value, bool) or not isinstance(value, str | int | float):
                raise FieldError(field, f"{field!r} in {key!r} is neither text nor a number")
            texts.append(str(value))
    return "".join(texts)


@lru_cache(maxsize=64)
def template_parts(key: str) -> tuple[tuple[str, str | None], ...]:
    """Return the literal texts of a template, each with the field that follows it.

    Raises:
        ConfigError: If braces are not balanced.
    """
    try:
        parsed = list(string.Formatter().parse(key))
    except ValueError as error:
        raise ConfigError(f"{key!r} is not a valid template: {error}; write {{{{ and }}}} for literal braces") from None
    return tuple((literal, field) for literal, field, _, _ in parsed)


@dataclass(frozen=True)
class Filter:
    """Condition that a field of a document must meet.

    Attributes:
        field: Name of a field, or a dotted path.
        comparison: Kind of comparison; `..` is an inclusive range.
        values: Values to compare with, as texts. With several values, `=` means any and `!=` means none of them.
    """

    field: str
    comparison: Comparison
    values: tuple[str, ...]

    def is_met(self, record: Any) -> bool:
        """Return whether a record meets this condition; null never does. Raises FieldError if the field is missing."""
        if not isinstance(record, dict):
            raise FieldError(self.field, f"no field {self.field!r}: the line is not an object")
        value = look_up(record, self.field)
        if value is None:
            return False
        if isinstance(value, list | dict):
            raise FieldError(self.field, f"{self.field!r} is a list or an object, which cannot be compared")
        if self.comparison in ("=", "!="):
            is_one_of_them = any(_equal(value, text) for text in self.values)
            return is_one_of_them == (self.comparison == "=")

        # An order: of numbers if the value is one, else of texts.
        bounds: Sequence[Any] = self.values
        if isinstance(value, bool):
            raise FieldError(self.field, f"{self.field!r} is a boolean, which has no order")
        if isinstance(value, int | float):
            try:
                bounds = list(map(float, self.values))
            except ValueError:
                raise FieldError(self.field, f"{self.field!r} is a number, but {self} compares texts") from None
        if self.comparison == "..":
            return bool(bounds[0] <= value <= bounds[1])
        results: Mapping[str, bool] = {
            ">=": value >= bounds[0],
            "<=": value <= bounds[0],
            ">": value > bounds[0],
            "<": value < bounds[0],
        }
        return results[self.comparison]

    def __str__(self) -> str:
        if self.comparison == "..":
            return f"{self.field}={self.values[0]}..{self.values[1]}"
        return f"{self.field}{self.comparison}{','.join(self.values)}"


def _equal(value: Any, text: str) -> bool:
    """Return whether a JSON value equals the value that a text stands for."""
    if isinstance(value, bool):
        return str(value).lower() == text.lower()
    if isinstance(value, int | float):
        try:
            return value == float(text)
        except ValueError:
            return False
    return bool(value == text)


def read_filter(text: str) -> Filter:
    """Parse a filter.

    Args:
        text: `FIELD=VALUE[,VALUE...]`, `FIELD!=VALUE`, `FIELD>=VALUE` (and `<=`, `>`, `<`), or `FIELD=LOW..HIGH`.

    Raises:
        ConfigError: If the text is not a filter.
    """
    found = _FILTER.fullmatch(text.strip())
    if found is None or not found[3].strip():
        raise ConfigError(
            f"--filter {text!r}: give FIELD=VALUE[,VALUE...], FIELD!=VALUE, FIELD>=VALUE (<=, >, <) or FIELD=LOW..HIGH"
        )
    field = found[1].strip()
    value = found[3].strip()
    low, dots, high = value.partition("..")
    if found[2] == "=" and dots and low and high:
        return Filter(field, "..", (low, high))
    values = (value,)
    if found[2] in ("=", "!="):
        values = tuple(value.split(","))
    comparison: Any = found[2]
    return Filter(field, comparison, values)


def columns_of(keys: Sequence[str], filters: Sequence[Filter] = ()) -> tuple[str, ...]:
    """Return the fields that keys and filters need: names, or dotted paths."""
    fields: list[str] = []
    for key in keys:
        if "{" in key:
            for _, field in template_parts(key):
                if field:
                    fields.append(field)
        else:
            fields.append(key)
    for each in filters:
        fields.append(each.field)
    return tuple(dict.fromkeys(fields))
