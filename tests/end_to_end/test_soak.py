"""A small version of benchmarks/soak.py: faults at random steps, after which losses are those of an undisturbed run."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from benchmarks.soak import Result, possible_scenarios, soak, summary, train_with_faults
from benchmarks.soak_faults import listens
from benchmarks.soak_training import Training, wait
from tests.end_to_end.network_namespaces import why_not

_REASON = why_not()


def check(results: list[Result], faults: int) -> None:
    numbers = summary(results)
    assert numbers["problems"] == []
    assert numbers["faults"] == faults
    assert numbers["starts"] > len(results)


@pytest.mark.slow
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
def test_a_run_whose_checkpoints_are_all_damaged_ends(tmp_path: Path) -> None:
    training = Training(tmp_path, "one-rank")
    training.start()
    try:
        wait(lambda: bool(training.checkpoints()) or training.ended(), "checkpoint")
        (rank,) = training.pids("rank")
        os.kill(rank, signal.SIGSTOP)
        for iteration in training.checkpoints():
            path = training.save / f"global_step{iteration}" / "mp_rank_00_model_states.pt"
            path.write_bytes(path.read_bytes()[:-1] + b"?")
        os.kill(rank, signal.SIGKILL)
        wait(training.ended, "end")
    finally:
        training.end()
    assert training.process is not None
    assert training.process.returncode == 1
    ends = training.ends()
    assert [end["reported"] for end in ends] == [None, "no checkpoint", "no checkpoint"]
    assert "no complete checkpoint in" in ends[1]["cause"]
    assert (ends[-1]["decision"], "damaged" in ends[-1]["reason"]) == ("stop", True)
    assert "move them all away" in (tmp_path / "log").read_text()


@pytest.mark.slow
@pytest.mark.netns
@pytest.mark.skipif(_REASON is not None, reason=_REASON or "")
@pytest.mark.parametrize(
    ("scenario", "fault"),
    [("spare-host", "cut"), ("spare-host", "stop-agent"), ("elastic", "cut"), ("elastic", "stop-agent")],
)
def test_a_host_that_is_lost(tmp_path: Path, scenario: str, fault: str) -> None:
    result = train_with_faults(tmp_path, 0, scenario, [fault, "rank"], seed=1)
    assert (result.faults[0], result.problems) == (fault, [])
    assert result.starts > 1


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_faults_in_each_scenario(tmp_path: Path) -> None:
    scenarios = possible_scenarios()
    faults = 2 * len(scenarios)
    results = soak(tmp_path, faults, seed=1, scenarios=scenarios, each=2)
    check(results, faults)
    assert {result.scenario for result in results} == set(scenarios)
