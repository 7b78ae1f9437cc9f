"""What launch tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.end_to_end.launched_runs import LaunchedRun


@pytest.fixture
def runs() -> Iterator[list[LaunchedRun]]:
    """Runs to clean up after."""
    started: list[LaunchedRun] = []
    yield started
    for run in started:
        run.end()
