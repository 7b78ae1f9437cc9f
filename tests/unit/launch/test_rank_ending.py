"""The state machine for the end of one host's ranks."""

from __future__ import annotations

import signal
import time

import pytest

from neox.launch.agent.rank_ending import EndReason, EndState, RankEnding, RanksToKill


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The monotonic clock, which only the test moves."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_a_stop_signal_gives_time_to_answer_and_then_time_to_save(clock: list[float]) -> None:
    ending = RankEnding()
    assert ending.ranks_to_kill() is RanksToKill.NONE
    assert not ending.is_answer_to_stop(-signal.SIGTERM)
    ending.stop(signal.SIGTERM, answer_seconds=5.0, stop_timeout=60.0)
    assert (ending.state, ending.reason) == (EndState.STOPPING, EndReason.STOP_SIGNAL)
    assert [ending.is_answer_to_stop(code) for code in (-signal.SIGTERM, 143, 1)] == [True, True, False]
    clock[0] += 5
    assert ending.ranks_to_kill() is RanksToKill.SILENT
    assert ending.ranks_to_kill() is RanksToKill.NONE  # those that answered may save
    clock[0] += 55
    assert ending.ranks_to_kill() is RanksToKill.ALL
    assert ending.state is EndState.KILLING
    assert ending.ranks_to_kill() is RanksToKill.ALL  # until none is left


def test_a_failure_while_ranks_save_ends_them_sooner_and_a_later_signal_gives_no_more_time(clock: list[float]) -> None:
    ending = RankEnding()
    ending.stop(signal.SIGTERM, answer_seconds=5.0, stop_timeout=60.0)
    ending.end(EndReason.RANK_FAILED, seconds=0.7)
    assert (ending.state, ending.reason) == (EndState.ENDING, EndReason.RANK_FAILED)
    ending.stop(signal.SIGINT, answer_seconds=5.0, stop_timeout=60.0)
    ending.end(EndReason.NO_WATCHDOG, seconds=10.0)
    assert (ending.state, ending.reason) == (EndState.ENDING, EndReason.RANK_FAILED)
    clock[0] += 0.7
    assert ending.ranks_to_kill() is RanksToKill.ALL


def test_an_order_of_the_launcher_replaces_another_reason(clock: list[float]) -> None:
    ending = RankEnding()
    ending.end(EndReason.RANK_FAILED, seconds=0.7)
    ending.end(EndReason.ORDER, seconds=0.0)
    assert ending.reason is EndReason.ORDER
    assert ending.ranks_to_kill() is RanksToKill.ALL
