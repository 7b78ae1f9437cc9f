"""Base class of all sections: frozen, closed to unknown keys, documented under each field."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError


@dataclass(frozen=True)
class OnlyWith:
    """Of a field, in `Annotated`: its value changes something only where another key is on. Several: where any is.

    key: dotted path of that key; values: those that mean on, where it is not enough to be true, given or above 0. A
    list is on where an item is.
    """

    key: str
    values: tuple[Any, ...] = ()

    def is_on(self, value: Any) -> bool:
        """Whether a value of `key` switches the field on."""
        if isinstance(value, (list, tuple)) and self.values:
            return any(self.is_on(item) for item in value)
        return value in self.values if self.values else bool(value)

    def __str__(self) -> str:
        if self.values == (None,):
            return f"`{self.key}` unset"
        return f"`{self.key}{': ' if self.values else ''}{', '.join(map(str, self.values))}`"


@dataclass(frozen=True)
class Status:
    """Of a field of a block, in `Annotated`: what happens to it where it does not work, as for gpt-neox's flat keys."""

    name: Literal["refused", "no effect"]


def status_of(info: FieldInfo) -> str:
    """Return the status of a field: `works`, `refused` or `no effect`."""
    return next((item.name for item in info.metadata if isinstance(item, Status)), "works")


def conditions_of(info: FieldInfo) -> tuple[OnlyWith, ...]:
    """Return the conditions of a field, any of which gives it an effect; none: it always has one."""
    return tuple(item for item in info.metadata if isinstance(item, OnlyWith))


def any_of(conditions: tuple[OnlyWith, ...]) -> str:
    """Return conditions as text, joined by `or`."""
    return " or ".join(map(str, conditions))


class Section(BaseModel):
    """Keys that belong together; nothing changes after validation."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, defer_build=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse `num_layers: true`, which pydantic would read as 1."""
        if isinstance(value, bool) and info.field_name is not None:
            annotation = cls.model_fields[info.field_name].annotation
            kinds = (annotation, *get_args(annotation))
            if bool not in kinds and (int in kinds or float in kinds):
                raise PydanticCustomError("number_type", "should be a number")
        return value
