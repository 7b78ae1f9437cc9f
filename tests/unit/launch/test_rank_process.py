"""Processes of ranks as their agent sees them, the watchdog, and what starts on every host."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from neox.launch.agent import rank_process
from neox.launch.agent.rank_process import RankProcess
from neox.launch.agent.watchdog import Watchdog
from neox.launch.events import Event
from neox.launch.failures import failure_cause, lacks_memory
from neox.launch.processes import is_alive

ROOT = Path(__file__).resolve().parents[3]


def run(rank: int, code: str, log: Path) -> tuple[RankProcess, list[Event]]:
    """Run Python code as a rank to its end."""
    events: list[Event] = []
    process = RankProcess(rank, log, events.append)
    process.start([sys.executable, "-c", code], os.environ, str(ROOT), None)
    while not process.poll():
        time.sleep(0.01)
    return process, events


def texts(events: list[Event], kind: str = "line") -> list[str]:
    return [event["text"] for event in events if event["kind"] == kind]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_costs_the_log_and_not_the_run() -> None:
    process, events = run(0, "print('one', flush=True); print('two')", Path("/dev/full"))
    assert process.code == 0
    assert [text for text in texts(events) if not text.startswith("[rank 0] ")] == ["one", "two"]
    assert sum(text.startswith("[rank 0] ") for text in texts(events)) == 1


def test_output_events_and_logs(tmp_path: Path) -> None:
    code = "import sys; print('plain'); print('[rank 3] marked'); sys.exit('the reason')"
    process, events = run(3, code, tmp_path / "log")
    assert texts(events) == ["[rank 3] marked"]
    assert texts(events, "tail") == ["the reason"]
    assert (process.code, events[-1]["code"], events[-1]["rank"]) == (1, 1, 3)
    assert (tmp_path / "log").read_text().splitlines() == ["plain", "[rank 3] marked", "the reason"]
    assert process.stack_lines(0) == ["not running"]
    _, events = run(0, "import os; os.kill(os.getpid(), 9)", tmp_path / "log")
    assert events[-1]["code"] == -9
    assert "started again" in (tmp_path / "log").read_text()


def test_a_traceback_that_ends_rank_0_is_sent_once(tmp_path: Path) -> None:
    code = "import sys; print('before', file=sys.stderr, flush=True); raise ValueError('the reason')"
    _, events = run(0, code, tmp_path / "log")
    assert texts(events) == ["before"]
    assert texts(events, "tail")[0] == "Traceback (most recent call last):"
    assert texts(events, "tail")[-1] == "ValueError: the reason"


def test_a_traceback_that_rank_0_survives_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import traceback\ntry: 1 / 0\nexcept ZeroDivisionError: traceback.print_exc()\n"
    _, events = run(0, code, tmp_path / "log")
    assert texts(events)[-1].startswith("ZeroDivisionError")
    monkeypatch.setattr(rank_process, "_HOLD_SECONDS", 0.0)
    events = []
    process = RankProcess(0, tmp_path / "other", events.append)
    process.start([sys.executable, "-c", code + "import time; time.sleep(600)"], os.environ, str(ROOT), None)
    deadline = time.monotonic() + 20
    while not any(text.startswith("ZeroDivisionError") for text in texts(events)) and time.monotonic() < deadline:
        process.read("err")
        process.show_survived_traceback()
        time.sleep(0.01)
    process.kill()
    while not process.poll():
        time.sleep(0.01)
    assert texts(events)[0] == "Traceback (most recent call last):"
    assert events[-1]["killed"]


def test_the_end_of_a_rank_is_the_end_of_what_it_has_started(tmp_path: Path) -> None:
    code = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid, flush=True)"
    _, events = run(0, code, tmp_path / "log")
    assert not is_alive_soon(int(texts(events)[0]))


def is_alive_soon(pid: int) -> bool:
    """Whether a process that has been killed is still there after the kernel had time to end it."""
    deadline = time.monotonic() + 10
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return is_alive(pid)


def test_the_watchdog_kills_groups_when_the_agent_has_died() -> None:
    code = (
        "import os, subprocess, sys\n"
        "from neox.launch.agent.watchdog import Watchdog\n"
        "watchdog = Watchdog()\n"
        "pids = [subprocess.Popen(['sleep', '600'], start_new_session=True, stdout=-3).pid for _ in range(2)]\n"
        "[watchdog.add(pid) for pid in pids]; watchdog.remove(pids[1])\n"
        "print(*pids, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    added, removed = map(int, done.stdout.split())
    try:
        assert not is_alive_soon(added)
        assert is_alive(removed)
    finally:
        os.kill(removed, 9)


def test_a_watchdog_that_has_ended_is_noticed() -> None:
    watchdog = Watchdog()
    assert not watchdog.has_ended()
    watchdog.close()
    watchdog.add(1)
    assert watchdog.has_ended()


def test_processes_on_every_host_start_without_the_configuration() -> None:
    names = ("agent.host_agent", "agent.bootstrap", "agent.watchdog", "hosts.remote")
    code = f"import sys, {', '.join(f'neox.launch.{name}' for name in names)}\n"
    code += "assert not {'pydantic', 'yaml', 'neox.config', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_what_was_killed_for_lack_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kills = iter([5, 5, 5, 6])
    monkeypatch.setattr(rank_process, "memory_kills", lambda: next(kills))
    _, killed_by_hand = run(0, "import os; os.kill(os.getpid(), 9)", tmp_path / "log")
    _, killed_by_kernel = run(0, "import os; os.kill(os.getpid(), 9)", tmp_path / "log")
    assert [events[-1]["out_of_memory"] for events in (killed_by_hand, killed_by_kernel)] == [False, True]
    how = failure_cause(-9, True, 3 * 2**29)
    assert "SIGKILL" in how
    assert "1.50 GiB" in how


def test_memory_that_a_rank_does_not_get_is_named(tmp_path: Path) -> None:
    code = "import resource as r; r.setrlimit(r.RLIMIT_AS, (2**29, 2**29)); bytearray(2**30)"  # a limit on itself first
    process, events = run(0, code, tmp_path / "log")
    assert (process.code, events[-1]["out_of_memory"]) == (1, True)
    assert "plan" not in failure_cause(1, True, None)
    assert lacks_memory(["DefaultCPUAllocator: can't allocate memory"])
