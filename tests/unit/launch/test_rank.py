"""The keeper of one rank, with the test as its agent."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from neox.launch.events import LineBuffer, decode_event
from neox.launch.rank import RankKeeper


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_costs_the_log_and_not_the_run() -> None:
    keepers, agent = socket.socketpair()
    with keepers, agent:
        keeper = RankKeeper(keepers, 0, Path("/dev/full"))
        assert keeper.run([sys.executable, "-c", "print('one', flush=True); print('two')"], None) == 0
        events = [decode_event(line) for line in LineBuffer().feed(agent.recv(65536))]
    texts = [event["text"] for event in events if event is not None and event["kind"] == "line"]
    assert [text for text in texts if "log cannot be written" not in text] == ["one", "two"]
    assert sum("[rank 0] its log cannot be written, the run goes on" in text for text in texts) == 1


def test_processes_on_every_host_start_without_the_configuration() -> None:
    names = ("node", "rank", "bootstrap", "probe", "control", "secrets")
    code = f"import sys, {', '.join(f'neox.launch.{name}' for name in names)}\n"
    code += "assert not {'pydantic', 'yaml', 'neox.config', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
