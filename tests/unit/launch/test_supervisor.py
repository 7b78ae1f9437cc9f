"""What the supervisor concludes from the events of an agent."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import replace
from typing import Any

import pytest

from neox.launch import Host, LaunchSpec
from neox.launch.agent.agent_files import INTERRUPT_RANKS
from neox.launch.events import Event, encode_event
from neox.launch.supervisor.outcome import EndKind
from neox.launch.supervisor.run_facts import conclude
from neox.launch.supervisor.supervisor import SupervisionState, Supervisor

SPEC = LaunchSpec("run", (Host("localhost", (0, 1)),), "127.0.0.1", 20000, "train.py", (), "", "", "", sys.executable)


def tail(rank: int, text: str) -> Event:
    return {"kind": "tail", "rank": rank, "text": text, "more": False, "node": 0}


def end(rank: int, code: int, **changes: Any) -> Event:
    return {"kind": "exit", "rank": rank, "code": code, "out_of_memory": False, "killed": False, "node": 0, **changes}


def supervise(events: list[Event], before: str = "") -> int:
    """Supervise an agent that runs some code and then sends events."""
    lines = "\n".join(map(encode_event, [*events, {"kind": "done", "code": events[0].get("code", 1), "node": 0}]))
    return Supervisor(SPEC, [[sys.executable, "-c", f"{before}\nprint({lines!r})"]]).run().status


@pytest.mark.parametrize(
    ("last_word", "status"), [("RuntimeError: Connection closed by peer", 130), ("ValueError: a reason", 1)]
)
def test_what_follows_a_rank_that_ended_at_ctrl_c_is_no_error(
    last_word: str, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupt_launcher = (
        "import os, signal\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})\n"
        f"os.kill({os.getpid()}, signal.SIGINT)\n"
        "signal.sigwait({signal.SIGINT})"
    )
    former = signal.getsignal(signal.SIGINT)
    assert supervise([end(0, 130), tail(1, last_word), end(1, 1)], interrupt_launcher) == status
    assert ("error: rank 1" in capsys.readouterr().err) == (status == 1)
    assert signal.getsignal(signal.SIGINT) is former


def test_ctrl_c_goes_to_a_script_that_answers_it_until_it_comes_twice() -> None:
    received: list[int] = []
    supervisor = Supervisor(replace(SPEC, answers_interrupts=True), [], received.append)
    supervisor._on_signal(signal.SIGINT, None)
    assert received == [INTERRUPT_RANKS]
    assert supervisor.facts.stop_signal is None
    supervisor._on_signal(signal.SIGINT, None)
    assert received == [INTERRUPT_RANKS]
    assert supervisor.facts.stop_signal == signal.SIGINT


def test_the_cause_is_not_the_first_report_but_the_first_failure_of_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    status = supervise([tail(0, "RuntimeError: Connection closed by peer"), end(0, 1), tail(1, "why"), end(1, 7)])
    assert status == 7
    assert capfd.readouterr().err.splitlines()[-1] == "why"


def test_a_failed_connection_is_the_cause_if_the_other_ranks_were_killed(capfd: pytest.CaptureFixture[str]) -> None:
    killed = end(0, -9, killed=True)
    assert supervise([tail(1, "Connection refused"), end(1, 3), killed]) == 3
    assert supervise([killed, tail(1, "Connection refused"), end(1, 3)]) == 3
    assert capfd.readouterr().err.splitlines()[-1] == "Connection refused"


def supervisor_of_two_hosts(signals: list[int]) -> Supervisor:
    hosts = (Host("a", (0,)), Host("b", (0,)))
    return Supervisor(replace(SPEC, hosts=hosts, stop_timeout=60.0), [], signals.append)


def test_a_lost_host_comes_before_the_broken_connections_of_the_others() -> None:
    """The end of a host breaks the connections of the ranks on others, which report it first."""
    supervisor = supervisor_of_two_hosts([])
    supervisor._take_event(tail(0, "RuntimeError: Connection closed by peer"))
    supervisor._take_event(end(0, 1))
    supervisor._lose(1, "ssh exited with exit code 255")
    supervisor._take_event({"kind": "done", "code": 1, "node": 0})
    found, explanation = conclude(supervisor.facts, [1, 255])
    assert found.kind is EndKind.HOST
    assert found.hosts == ("b",)
    assert "b" in explanation[-1]


def test_a_failure_of_its_own_comes_before_a_lost_host() -> None:
    supervisor = supervisor_of_two_hosts([])
    supervisor._take_event(tail(0, "ValueError: a reason"))
    supervisor._take_event(end(0, 1))
    supervisor._lose(1, "ssh exited with exit code 255")
    found, _ = conclude(supervisor.facts, [1, 255])
    assert (found.kind, found.rank) == (EndKind.RANK, 0)


def watched(supervisor: Supervisor) -> None:
    """What the supervisor does after it has read the output of a polling round."""
    if supervisor.facts.stop_signal is not None:
        supervisor._pass_on_stop(supervisor.facts.stop_signal)
    supervisor._end_state_when_due()


def test_two_signals_in_one_polling_round_end_the_run_at_once() -> None:
    supervisor = supervisor_of_two_hosts([])
    supervisor._on_signal(signal.SIGTERM, None)
    supervisor._on_signal(signal.SIGTERM, None)
    watched(supervisor)
    assert supervisor.state is SupervisionState.OVER


@pytest.mark.parametrize("ended", [False, True], ids=["all ranks run", "one has ended by it"])
def test_one_signal_leaves_time_to_save(ended: bool) -> None:
    received: list[int] = []
    supervisor = supervisor_of_two_hosts(received)
    if ended:
        supervisor._take_event(end(0, 128 + signal.SIGTERM))
    supervisor._on_signal(signal.SIGTERM, None)
    watched(supervisor)
    assert supervisor.state is SupervisionState.STOPPING
    assert received == [signal.SIGTERM]


@pytest.mark.parametrize("signal_first", [False, True], ids=["failure first", "signal first"])
def test_a_signal_around_a_failure_does_not_wait_for_saves(signal_first: bool) -> None:
    """Ranks cannot save without the one that has failed, whichever comes first in a polling round."""
    received: list[int] = []
    supervisor = supervisor_of_two_hosts(received)
    if signal_first:
        supervisor._on_signal(signal.SIGTERM, None)
    supervisor._take_event(tail(0, "ValueError: a reason"))
    supervisor._take_event(end(0, 1))
    if not signal_first:
        supervisor._on_signal(signal.SIGTERM, None)
    watched(supervisor)
    assert supervisor.state is SupervisionState.COLLECTING
    assert supervisor.state_ends_at is not None
    assert supervisor.state_ends_at < time.monotonic() + 10.0, "stop_timeout is 60 s"
    assert received == []
