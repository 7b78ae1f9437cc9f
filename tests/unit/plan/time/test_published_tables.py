"""Tables of published runs in the documentation: they are what the estimates say today."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import published_memory
from benchmarks.step_time import predict, read_rows

PAGE = (Path(__file__).resolve().parents[4] / "docs" / "performance.md").read_text(encoding="utf-8").splitlines()


def test_times_in_the_documentation() -> None:
    for found in map(predict, read_rows()):
        ratio = f"{found.lowest:.2f}" if found.complete else f"{found.lowest:.2f} to {found.highest:.2f}"
        assert f"| {found.name} | {ratio} |" in PAGE


def test_memory_in_the_documentation(capsys: pytest.CaptureFixture[str]) -> None:
    published_memory.main([])
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 10
    assert set(rows) <= set(PAGE)
    ratios = [float(row.split("|")[-2]) for row in rows[2:]]
    within = [abs(ratio - 1) <= 0.10 for ratio in ratios]
    assert sum(within) >= 7
