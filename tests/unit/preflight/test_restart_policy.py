"""Which failures a run is started again after, when, and which not."""

from __future__ import annotations

from pathlib import Path

import pytest

from neox.launch import Cause, FailureReport
from neox.launch.status.event_log import record_event
from neox.launch.supervisor.outcome import EndKind, RunEnd
from neox.preflight.restart_policy import RestartPolicy
from neox.run_events import EVENTS_FILE, read_events


class Clock:
    """Seconds that a test sets."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def failed(rank: int | None = 0, step: int | None = None, status: int = 137, cause: str | None = None) -> RunEnd:
    report = None if cause is None else FailureReport(cause, step)
    return RunEnd(EndKind.RANK, status, "rank failed", rank, ("here",), step, report)


def test_a_rank_that_dies_is_started_again_at_once_as_often_as_allowed() -> None:
    policy = RestartPolicy(2)
    decisions = [policy.decide(failed(rank, step=rank + 1)) for rank in range(3)]
    assert [decision.restart for decision in decisions] == [True, True, False]
    assert [decision.pause for decision in decisions] == [0, 0, 0]
    assert policy.restarts == 2
    assert "max_restarts is 2" in decisions[-1].reason


def test_pauses_grow_while_the_same_step_fails_and_end_with_another() -> None:
    policy = RestartPolicy(100)
    pauses = [policy.decide(failed(rank, step=5)).pause for rank in range(5)]
    assert pauses == [0, 1, 2, 4, 8]
    assert policy.decide(failed(9, step=6)).pause == 0
    assert policy.decide(failed(8, step=6)).pause == 1
    longest = [policy.decide(failed(rank, step=6)).pause for rank in range(20)][-1]
    assert longest == 300


def test_pauses_stay_at_their_limit() -> None:
    policy = RestartPolicy(2000)
    pauses = [policy.decide(failed(rank, step=5)).pause for rank in range(1500)]
    assert set(pauses[10:]) == {300}


def test_the_same_rank_counts_only_soon_after_a_start() -> None:
    clock = Clock()
    policy = RestartPolicy(10, clock)
    policy.decide(failed(3, step=1))
    policy.started()
    clock.seconds = 30
    assert policy.decide(failed(3, step=2)).pause == 1
    policy.started()
    clock.seconds = 200
    assert policy.decide(failed(3, step=9)).pause == 0


def test_a_host_that_does_not_answer_is_waited_for() -> None:
    clock = Clock()
    policy = RestartPolicy(1, clock)
    away = RunEnd(EndKind.NOT_STARTED, 1, "no answer from far", hosts=("far",))
    policy.decide(RunEnd(EndKind.HOST, 1, hosts=("far",)))
    assert [policy.decide(away).pause for _ in range(9)] == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert policy.restarts == 1
    policy.started()
    clock.seconds = 5000
    assert policy.decide(away).pause == 1
    clock.seconds += 3600
    assert not policy.decide(away).restart


@pytest.mark.parametrize(
    "end",
    [failed(status=2), failed(cause=Cause.REFUSED), failed(step=4, cause=Cause.DISK_FULL)],
    ids=["status 2", "refused", "disk full"],
)
def test_what_a_restart_cannot_help(end: RunEnd) -> None:
    decision = RestartPolicy(10).decide(end)
    assert not decision.restart
    assert decision.reason


def test_a_loss_that_is_not_finite_is_tried_once_more() -> None:
    policy = RestartPolicy(10)
    assert policy.decide(failed(step=7, cause=Cause.NOT_FINITE)).restart
    assert policy.decide(failed(step=9, cause=Cause.NOT_FINITE)).restart
    assert policy.decide(failed(step=8)).restart
    assert not policy.decide(failed(step=9, cause=Cause.NOT_FINITE)).restart


def test_damaged_checkpoints_are_read_once_more() -> None:
    """Another host may read them better."""
    policy = RestartPolicy(10)
    assert policy.decide(failed(step=7)).restart
    assert policy.decide(failed(status=1, cause=Cause.NO_CHECKPOINT)).restart
    decision = policy.decide(failed(status=1, cause=Cause.NO_CHECKPOINT))
    assert not decision.restart
    assert "damaged" in decision.reason


def test_a_run_that_ended_well_or_was_asked_to_is_over() -> None:
    policy = RestartPolicy(10)
    for end in (RunEnd(EndKind.FINISHED, 0), RunEnd(EndKind.ASKED, 143), RunEnd(EndKind.ASKED, 0)):
        decision = policy.decide(end)
        assert (decision.restart, decision.reason) == (False, "")
    for kind in (EndKind.RANK, EndKind.HANG, EndKind.HOST, EndKind.SILENT):
        assert not policy.decide(RunEnd(kind, 1, asked=True)).restart
    assert policy.decide(RunEnd(EndKind.HANG, 124)).restart
    assert policy.decide(RunEnd(EndKind.HOST, 1, hosts=("far",))).restart


def test_a_first_start_without_any_agent_is_final() -> None:
    """Such as options that srun refuses. Later srun may wait for a node that slurm has not missed yet."""
    end = RunEnd(EndKind.NO_AGENT, 1)
    policy = RestartPolicy(10)
    decision = policy.decide(end)
    assert not decision.restart
    assert "nothing has run" in decision.reason
    policy = RestartPolicy(10)
    assert policy.decide(failed(step=7)).restart
    assert policy.decide(end).restart


def test_a_host_that_is_taken_needs_another_one() -> None:
    end = RunEnd(EndKind.PREEMPTED, 0, hosts=("far",))
    assert not RestartPolicy(10).decide(end).restart
    assert RestartPolicy(10).decide(end, can_move=True).restart


def test_events_are_read_back_without_a_line_that_is_cut_off(tmp_path: Path) -> None:
    record_event(tmp_path, "start", ranks=2, step=None)
    record_event(tmp_path, "end", rank=1, step=3)
    with open(tmp_path / EVENTS_FILE, "a") as file:
        file.write('{"time": 1, "ev')
    assert [(event["event"], event["step"]) for event in read_events(tmp_path)] == [("start", None), ("end", 3)]
    assert read_events(tmp_path / "nowhere") == []
