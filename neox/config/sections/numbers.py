"""Types of numbers with bounds."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

PositiveInt = Annotated[int, Field(ge=1)]
"""A count or a size: 1 or more."""
NonNegativeInt = Annotated[int, Field(ge=0)]
"""A count that may be 0."""
PositiveFloat = Annotated[float, Field(gt=0)]
"""A number above 0."""
NonNegativeFloat = Annotated[float, Field(ge=0)]
"""A number that is 0 or more."""
Fraction = Annotated[float, Field(ge=0, le=1)]
"""A part of a whole, from 0 to 1."""
PositiveFraction = Annotated[float, Field(gt=0, le=1)]
"""A part of a whole, above 0 and up to 1."""
Beta = Annotated[float, Field(ge=0, lt=1)]
"""The decay rate of a running mean: from 0 to below 1."""
DropRate = Annotated[float, Field(ge=0, lt=1)]
"""The probability with which dropout clears an element: from 0 to below 1."""
Port = Annotated[int, Field(ge=1, le=65535)]
"""A TCP port."""
