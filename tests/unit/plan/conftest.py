"""A small configuration that resolves, to be bent by each test."""

from __future__ import annotations

from typing import Any

import pytest

from tests.plans import SIZES


@pytest.fixture
def tiny() -> dict[str, Any]:
    return dict(SIZES)
