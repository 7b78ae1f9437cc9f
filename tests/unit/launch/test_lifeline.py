"""Signs that the launcher is gone: the end of the input, or packets that are not answered."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from neox.launch.agent.lifeline import follow_launcher, is_unanswered, ssh_ports
from neox.launch.processes import exit_status

HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
ROW = "   1: 0100000A:{here:04X} 0200000A:{there:04X} 01 024:000 01:017A {repeats:08X}     0 {probes:8d} 1\n"


def test_the_ports_of_ssh() -> None:
    assert ssh_ports({"SSH_CONNECTION": "10.0.0.2 54321 10.0.0.1 22"}) == (22, 54321)
    assert ssh_ports({}) is None


def test_packets_that_are_repeated(tmp_path: Path) -> None:
    table = tmp_path / "tcp"

    def repeating(*rows: tuple[int, int, int]) -> bool:
        lines = [ROW.format(here=22, there=port, repeats=repeats, probes=probes) for port, repeats, probes in rows]
        table.write_text(HEAD + "".join(lines))
        return is_unanswered((22, 54321), [str(table), str(tmp_path / "none")])

    assert not repeating()
    assert not repeating((54321, 0, 0))
    assert repeating((54321, 15, 0), (777, 0, 0))
    assert repeating((54321, 0, 5))  # the link of this host is down: nothing could be sent yet
    assert not repeating((54321, 5, 0), (54321, 0, 0))  # two clients with one port


def test_the_end_of_the_input_and_silence() -> None:
    read, write = os.pipe()
    lost, silent = threading.Event(), threading.Event()
    thread = follow_launcher(read, lost.set, silent.is_set, seconds=0.2)
    assert not lost.wait(0.3)
    silent.set()
    assert lost.wait(1)
    thread.join()
    lost.clear()
    thread = follow_launcher(read, lost.set, lambda: False)
    os.write(write, b"x")
    os.close(write)
    assert lost.wait(2)
    thread.join()
    os.close(read)


def test_exit_statuses() -> None:
    assert [exit_status(code) for code in (0, 7, -9, -15)] == [0, 7, 137, 143]
