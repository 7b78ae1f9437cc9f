"""Which of several failures came first, and how much is said about the others."""

from __future__ import annotations

import sys

from neox.launch import Host, LaunchSpec
from neox.launch.supervisor.outcome import Failure, explain, find_cause, rank_list

SPEC = LaunchSpec(
    "run", (Host("a", (0, 1, 2)), Host("b", (0, 1, 2))), "a", 20000, "train.py", (), "", "", "/runs/x", sys.executable
)
TRACEBACK = "[rank3]: Traceback (most recent call last):\n[rank3]:   File 'x'\n[rank3]: ValueError: a reason\n"
CLOSED = (
    "[rank0]: Traceback (most recent call last):\n[rank0]: RuntimeError: [pair.cc:553] Connection closed by peer [a]\n"
)


def test_a_closed_connection_and_a_killed_rank_are_no_cause() -> None:
    closed = Failure(0, 1, text=CLOSED)
    killed = Failure(1, -9, killed=True, text="INFO: a step\n")
    own = Failure(3, 1, text=TRACEBACK)
    assert find_cause([closed, killed, own]) is own
    assert find_cause([closed, killed]) is None
    assert find_cause([Failure(2, 5)]) == Failure(2, 5)  # without a word


def test_consequences_have_one_line_each_and_the_cause_comes_last() -> None:
    cause = Failure(3, 1, text=TRACEBACK)
    killed = [Failure(rank, -9, killed=True, text="INFO: a step\n") for rank in (5, 1, 2)]
    lines = explain(SPEC, cause, [Failure(0, 1, text=CLOSED), cause, *killed])
    assert lines[-3:] == cause.lines
    consequences = [line for line in lines if line.startswith("  ")]
    assert len(consequences) == 2
    assert "Connection closed by peer" in consequences[0]
    assert "/runs/x/ranks/a/rank_0000.log" in consequences[0]
    assert "ranks 1-2, 5" in consequences[1]
    assert not any("rank0" in line for line in lines)


def test_the_message_is_the_first_line_of_an_error_and_the_last_of_a_traceback() -> None:
    error = "error: no complete checkpoint in /save:\n  global_step4: damaged\nmove it away\n"
    assert Failure(0, 1, text=error).message == "error: no complete checkpoint in /save"
    assert Failure(0, 1, text=TRACEBACK).message == "ValueError: a reason"
    assert Failure(0, -9).message == ""


def test_an_error_that_ranks_share_is_written_once() -> None:
    failures = [Failure(rank, 1, text="error: the loss is not a number\n") for rank in range(4)]
    lines = explain(SPEC, failures[2], failures)
    assert sum("not a number" in line for line in lines) == 1
    assert sum("ranks 0-1, 3" in line for line in lines) == 1


def test_many_consequences_are_counted() -> None:
    hosts = tuple(Host(f"h{number}", (0,)) for number in range(100))
    spec = LaunchSpec("run", hosts, "a", 20000, "train.py", (), "", "", "/runs/x", sys.executable)
    closed = [Failure(rank, 1, text=f"RuntimeError: Connection closed by peer {rank}\n") for rank in range(1, 100)]
    cause = Failure(0, 7)
    lines = explain(spec, cause, [cause, *closed])
    assert len(lines) < 15
    assert any("91 more" in line for line in lines)
    assert "/runs/x/ranks/h0/rank_0000.log" in lines[-1]


def test_rank_lists() -> None:
    assert rank_list([3]) == "rank 3"
    assert rank_list([0, 1, 2, 5, 7, 8]) == "ranks 0-2, 5, 7-8"
