"""A small version of benchmarks/soak.py: faults at random steps, after which losses are those of an undisturbed run."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from benchmarks.soak import SCENARIOS, Result, listens, soak, summary, train_with_faults


def check(results: list[Result], faults: int) -> None:
    numbers = summary(results)
    assert numbers["problems"] == []
    assert numbers["faults"] == faults
    assert numbers["starts"] > len(results)


def test_a_fault(tmp_path: Path) -> None:
    check(soak(tmp_path, 1, seed=1, scenarios=["one-rank"], each=1), 1)


def test_who_sets_up_process_groups_is_known_by_its_socket() -> None:
    with socket.create_server(("127.0.0.1", 0)):
        assert listens(os.getpid())


@pytest.mark.slow
def test_kills_while_process_groups_are_set_up(tmp_path: Path) -> None:
    result = train_with_faults(tmp_path, 0, "tensor", ["set-up", "set-up"], seed=2)
    assert (result.faults, result.problems) == (["set-up", "set-up"], [])
    assert result.starts >= 4


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_faults_in_each_scenario(tmp_path: Path) -> None:
    faults = 2 * len(SCENARIOS)
    results = soak(tmp_path, faults, seed=1, each=2)
    check(results, faults)
    assert {result.scenario for result in results} == set(SCENARIOS)
