"""What the supervisor concludes from the events of an agent."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from neox.launch import Host, LaunchSpec
from neox.launch.events import encode_event
from neox.launch.supervise import Supervisor


@pytest.mark.parametrize(
    ("last_word", "status"), [("RuntimeError: Connection closed by peer", 130), ("ValueError: a reason", 1)]
)
def test_what_follows_a_rank_that_ended_at_ctrl_c_is_no_error(
    last_word: str, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    events = (
        {"kind": "exit", "rank": 0, "code": 130, "node": 0},
        {"kind": "tail", "rank": 1, "text": last_word, "more": False, "node": 0},
        {"kind": "exit", "rank": 1, "code": 1, "node": 0},
        {"kind": "done", "code": 130, "node": 0},
    )
    lines = "\n".join(map(encode_event, events))
    agent = (
        "import os, signal\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})\n"
        f"os.kill({os.getpid()}, signal.SIGINT)\n"
        f"signal.sigwait({{signal.SIGINT}})\nprint({lines!r})"
    )
    former = signal.getsignal(signal.SIGINT)
    spec = LaunchSpec(
        "run", (Host("localhost", (0, 1)),), "127.0.0.1", 20000, "train.py", (), "", "", "", sys.executable
    )
    assert Supervisor(spec, [[sys.executable, "-c", agent]]).run() == status
    assert ("error: rank 1" in capsys.readouterr().err) == (status == 1)
    assert signal.getsignal(signal.SIGINT) is former
