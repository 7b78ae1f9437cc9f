"""Progress as plain lines, if stderr is no terminal."""

from __future__ import annotations

import pytest

from neox.log import progress


def line_of(unit: str, total: float | None, done: float, capsys: pytest.CaptureFixture[str]) -> str:
    with progress("reading", total, unit) as bar:
        bar.update(done)
    return capsys.readouterr().err.strip()


def test_bytes_are_shown_in_megabytes(capsys: pytest.CaptureFixture[str]) -> None:
    line = line_of("B", 8_000_000, 2_000_000, capsys)
    assert line.startswith("reading: 2.0 of 8.0 MB")
    assert line.endswith(" MB/s")
    assert line_of("B", None, 2_000_000, capsys).startswith("reading: 2.0 MB, ")


def test_other_units_are_counted_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert line_of("documents", 1000, 250, capsys).startswith("reading: 250 of 1,000 documents")
    assert line_of("documents", 1000, 0, capsys).endswith(", 0.0 documents/s")  # no time is left to name
    assert line_of("s", None, 5, capsys) == "reading: 5 s"


def test_more_than_was_expected_is_all_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert "(100 %)" in line_of("B", 1000, 1460, capsys)  # a small Parquet file, whose footer is read twice
