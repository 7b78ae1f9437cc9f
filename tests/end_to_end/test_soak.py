"""A small version of benchmarks/soak.py: faults at random steps, after which losses are those of an undisturbed run."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.soak import SCENARIOS, Result, soak, summary


def check(results: list[Result], faults: int) -> None:
    numbers = summary(results)
    assert numbers["problems"] == []
    assert numbers["faults"] == faults
    assert numbers["starts"] > len(results)


def test_a_fault(tmp_path: Path) -> None:
    check(soak(tmp_path, 1, seed=1, scenarios=["one-rank"], each=1), 1)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_twenty_faults_over_all_scenarios(tmp_path: Path) -> None:
    results = soak(tmp_path, 20, seed=1, each=2)
    check(results, 20)
    assert {result.scenario for result in results} == set(SCENARIOS)
