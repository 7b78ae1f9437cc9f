"""Conditions and number types of fields: when a condition holds, what it says, and which numbers are taken."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from pydantic import Field, ValidationError

from neox.config.reference import type_name
from neox.config.sections.base import Section, has_unbounded_number
from neox.config.sections.conditions import Condition, Excludes, OnlyWith, Requires, in_words
from neox.config.sections.numbers import Beta, PositiveInt
from neox.config.sections.optimizer_kind import OptimizerParams
from neox.config.sections.optimizer_table import OPTIMIZERS


@pytest.mark.parametrize(
    ("condition", "on", "off"),
    [
        (Condition("key"), [True, 1, "a", ("a",)], [None, False, 0, "", ()]),
        (Condition("key", ("a", None)), ["a", None, ["b", "a"]], ["b", ["b"]]),
        (Condition("key", above=1), [2], [None, 0, 1]),
    ],
)
def test_values_that_switch_a_condition_on(condition: Condition, on: list[Any], off: list[Any]) -> None:
    assert [value for value in on if not condition.is_on(value)] == []
    assert [value for value in off if condition.is_on(value)] == []


@pytest.mark.parametrize(
    ("key", "field", "path"),
    [
        ("load", "checkpoint.scale", "load"),
        (".device", "zero.offload.nvme_path", "zero.offload.device"),
        (".schedule_config.step", "curriculum.type", "curriculum.schedule_config.step"),
    ],
)
def test_a_key_with_a_dot_in_front_is_in_the_same_block(key: str, field: str, path: str) -> None:
    assert Condition(key).path(field) == path


class _Example(Section):
    """Fields with conditions and bounds."""

    plain: int = 0
    """No bounds."""

    count: Annotated[PositiveInt | None, OnlyWith("a"), OnlyWith("b")] = None
    """A bounded number."""

    means: Annotated[tuple[Beta, Beta], Requires("c", when=("x",)), Excludes("d"), Excludes("e", above=2)] = (0.9, 0.9)
    """Two bounded numbers."""

    rates: tuple[float, Beta] = (0.9, 0.9)
    """One number has no bounds."""


def test_the_reference_page_says_conditions_and_types() -> None:
    fields = _Example.model_fields
    assert in_words(fields["plain"]) == ""
    assert in_words(fields["count"]) == "Only with `a` or `b`."
    assert in_words(fields["means"]) == "`x`: needs `c`. Not with `d` or `e` above 2."
    assert type_name(fields["count"].annotation) == "int"


def test_numbers_without_bounds_are_found() -> None:
    assert [name for name, info in _Example.model_fields.items() if has_unbounded_number(info)] == ["plain", "rates"]


def test_true_is_no_number_with_bounds_either() -> None:
    for values in ({"count": True}, {"plain": True}):
        with pytest.raises(ValidationError):
            _Example.model_validate(values)


def test_an_optimizer_cannot_take_any_number() -> None:
    with pytest.raises(TypeError, match="momenta"):

        class _Unbounded(OptimizerParams):
            """Numbers of an optimizer whose author forgot bounds."""

            momenta: tuple[float, float] = Field((0.9, 0.999))


@pytest.mark.parametrize("name", [name for name, kind in OPTIMIZERS.items() if kind.cycled_betas])
def test_betas_are_below_one_for_every_optimizer(name: str) -> None:
    params = OPTIMIZERS[name].params
    with pytest.raises(ValidationError) as caught:
        params.model_validate({"betas": [1.5, 0.9]})
    assert [error["loc"] for error in caught.value.errors()] == [("betas", 0)]
