"""The memory of context ranks at 16,384 tokens: a share of one rank's, and what the plan says."""

from __future__ import annotations

import pytest

from benchmarks.context_memory import measured_rows


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "share"), [("fp32", 0.3), ("bf16", 0.31)])
def test_four_context_ranks_hold_little_more_than_a_quarter_of_the_activations(precision: str, share: float) -> None:
    rows = measured_rows(16384, 4, layers=4, hidden=256, heads=4, precision=precision)
    assert [row.kind for row in rows] == ["one rank", "all_gather", "ulysses"]
    for row in rows:
        assert row.planned == pytest.approx(row.measured, rel=0.05), row
    for row in rows[1:]:
        assert row.of_one_rank <= share, row
