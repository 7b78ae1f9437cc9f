"""What the supervisor concludes from the events of an agent."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from typing import Any

import pytest

from neox.launch import Host, LaunchSpec
from neox.launch.agent.agent_files import INTERRUPT_RANKS
from neox.launch.events import Event, encode_event
from neox.launch.supervisor.supervisor import Supervisor

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
