"""Base class of all sections: frozen, closed to unknown keys, documented under each field."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Interval, Le, Lt
from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError


class Section(BaseModel):
    """Keys that belong together; nothing changes after validation.

    The text under a field is its documentation. Only `neox.config.reference` reads it, because that takes time.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse `num_layers: true`, which pydantic would read as 1."""
        if isinstance(value, bool) and info.field_name is not None:
            kinds = set(plain_types(cls.model_fields[info.field_name].annotation))
            if bool not in kinds and kinds & {int, float}:
                raise PydanticCustomError("number_type", "should be a number")
        return value


def plain_types(annotation: Any) -> Iterator[Any]:
    """Yield the types that a value of a field may have: members of unions, without bounds; a Literal as it is."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from plain_types(get_args(annotation)[0])
    elif origin is None or origin is Literal or origin in (tuple, dict):
        yield annotation
    else:
        for member in get_args(annotation):
            yield from plain_types(member)


def has_unbounded_number(info: FieldInfo) -> bool:
    """Return whether a field takes numbers, or lists of numbers, that have no bounds."""
    if any(isinstance(item, Interval | Gt | Ge | Lt | Le) for item in info.metadata):
        return False
    return _takes_any_number(info.annotation)


def _takes_any_number(annotation: Any) -> bool:
    if annotation in (int, float):
        return True
    origin = get_origin(annotation)
    if origin in (Annotated, Literal):
        return False
    return any(_takes_any_number(member) for member in get_args(annotation))
