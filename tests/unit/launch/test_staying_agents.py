"""Agents of several hosts that stay after a failure, behind an ssh that starts their commands on this machine."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from neox.config.sections.runner import RunnerConfig
from neox.launch import Host, LaunchSpec
from neox.launch.hosts.doctor import HostChecks, examine_hosts
from neox.launch.orders import Orders, encode_order, end_order, signal_order, start_order
from neox.launch.processes import is_alive
from neox.launch.supervisor import supervisor
from neox.launch.supervisor.agent_processes import AgentProcesses
from neox.launch.supervisor.launchers import launch
from neox.launch.supervisor.outcome import EndKind, RunEnd

ROOT = Path(__file__).resolve().parents[3]
A, B, C = (Host(name, (0,)) for name in ("host-a", "host-b", "host-c"))

# Each start and rank writes what it is. Rank 1 of the first start ends as it is told; rank 0 would go on forever.
RANK = """
import os, signal, sys, time
from pathlib import Path

directory, start, end = sys.argv[1:]
name = Path("/proc/self/comm").read_text().strip()
Path(directory, f"{start}.{os.environ['RANK']}").write_text(f"{os.getppid()} {name}")
if start == "first" and os.environ["RANK"] == "1":
    while not Path(directory, "go").exists():
        time.sleep(0.02)
    if end == "fail":
        sys.exit(5)
    os.kill(os.getppid(), signal.SIGKILL)
while start == "first":
    time.sleep(1)
"""
SSH = """#!/bin/sh
for last; do :; done
exec sh -c "$last"
"""
# The same as two processes, of which only the client ends with the connection.
SSH_CLIENT = f"""#!{sys.executable}
import os, subprocess, sys, threading

pipe = subprocess.PIPE
remote = subprocess.Popen(["sh", "-c", sys.argv[-1]], stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)

def pass_on(source, target):
    while data := os.read(source, 65536):
        os.write(target, data)

threads = [threading.Thread(target=pass_on, args=(remote.stdout.fileno(), 1))]
threads.append(threading.Thread(target=pass_on, args=(remote.stderr.fileno(), 2)))
threading.Thread(target=pass_on, args=(0, remote.stdin.fileno()), daemon=True).start()
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
os._exit(remote.wait())
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    for name in ("ssh", "pdsh"):
        (tmp_path / name).write_text(SSH)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "rank.py").write_text(RANK)
    return {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}


@pytest.fixture
def agents() -> Iterator[AgentProcesses]:
    with AgentProcesses() as processes:
        yield processes


def spec(tmp_path: Path, start: str, end: str, hosts: tuple[Host, ...], spares: tuple[Host, ...] = ()) -> LaunchSpec:
    names = (str(tmp_path), str(ROOT), str(tmp_path / "run"), sys.executable)
    arguments = (str(tmp_path), start, end)
    run_id = f"{os.getpid()}-{start}-{tmp_path.name}"
    found = LaunchSpec(run_id, hosts, "127.0.0.1", 20000, str(tmp_path / "rank.py"), arguments, *names)
    return replace(found, warm_module="json", spares=spares)


def run(described: LaunchSpec, environment: dict[str, str], agents: AgentProcesses) -> RunEnd:
    return launch(described, RunnerConfig(launcher="pdsh"), environment, agents=agents)


def facts(tmp_path: Path, start: str, rank: int) -> list[str]:
    """The agent's process id and the name of the rank's process."""
    return (tmp_path / f"{start}.{rank}").read_text().split()


def wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def begin_when_ready(tmp_path: Path, agents: AgentProcesses) -> None:
    """Let rank 1 end once all ranks run; a spare host has had its time to get ready."""

    def follow() -> None:
        wait(lambda: (tmp_path / "first.0").exists() and (tmp_path / "first.1").exists())
        time.sleep(1.5 if len(agents.hosts) > 2 else 0)
        (tmp_path / "go").touch()

    threading.Thread(target=follow, daemon=True).start()


def test_all_agents_stay_when_one_rank_fails(
    tmp_path: Path, environment: dict[str, str], agents: AgentProcesses
) -> None:
    begin_when_ready(tmp_path, agents)
    end = run(spec(tmp_path, "first", "fail", (A, B)), environment, agents)
    assert (end.kind, end.rank, end.hosts) == (EndKind.RANK, 1, ("host-b",))
    assert run(spec(tmp_path, "second", "", (A, B)), environment, agents).kind is EndKind.FINISHED
    for rank in (0, 1):
        assert facts(tmp_path, "second", rank)[0] == facts(tmp_path, "first", rank)[0]


def test_a_spare_host_takes_the_place_of_a_lost_one_with_its_warm_process(
    tmp_path: Path, environment: dict[str, str], agents: AgentProcesses
) -> None:
    begin_when_ready(tmp_path, agents)
    end = run(spec(tmp_path, "first", "die", (A, B), (C,)), environment, agents)
    assert (end.kind, end.hosts) == (EndKind.HOST, ("host-b",))
    assert set(agents.hosts) == {"host-a", "host-c"}
    waiting = agents.hosts["host-c"].pid
    assert run(spec(tmp_path, "second", "", (A, C)), environment, agents).kind is EndKind.FINISHED
    assert facts(tmp_path, "second", 0)[0] == facts(tmp_path, "first", 0)[0]
    assert facts(tmp_path, "second", 1) == [str(waiting), "neox-rank"]


def test_a_stopped_agent_is_killed_although_another_rank_has_failed(
    tmp_path: Path, environment: dict[str, str], agents: AgentProcesses
) -> None:
    """A stopped process does not notice that its connection has ended."""
    threading.Thread(target=stop_agent, args=(tmp_path, 0, True), daemon=True).start()
    end = run(spec(tmp_path, "first", "fail", (A, B)), environment, agents)
    assert (end.kind, end.rank) == (EndKind.RANK, 1)
    wait(lambda: not is_alive(int(facts(tmp_path, "first", 0)[0])))


def test_an_agent_that_stops_is_lost_and_killed(
    tmp_path: Path, environment: dict[str, str], agents: AgentProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_STUCK_SECONDS", 3.0)
    threading.Thread(target=stop_agent, args=(tmp_path, 1, False), daemon=True).start()
    end = run(spec(tmp_path, "first", "fail", (A, B)), environment, agents)
    assert (end.kind, end.hosts) == (EndKind.HOST, ("host-b",))
    assert "nothing heard for 3 s" in end.cause
    wait(lambda: not is_alive(int(facts(tmp_path, "first", 1)[0])))


def test_an_agent_that_stops_is_killed_after_its_connection_was_ended(
    tmp_path: Path, environment: dict[str, str], agents: AgentProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_STUCK_SECONDS", 3.0)
    (tmp_path / "ssh").write_text(SSH_CLIENT)
    threading.Thread(target=stop_agent, args=(tmp_path, 1, False), daemon=True).start()
    end = run(spec(tmp_path, "first", "fail", (A, B)), environment, agents)
    assert (end.kind, end.hosts) == (EndKind.HOST, ("host-b",))
    wait(lambda: not is_alive(int(facts(tmp_path, "first", 1)[0])))


def test_an_agent_that_never_starts_is_lost(
    tmp_path: Path, environment: dict[str, str], agents: AgentProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_FIRST_EVENT_SECONDS", 3.0)
    (tmp_path / "ssh").write_text(f"""#!/bin/sh\ncase "$*" in *host-b*) exec sleep 600;; esac\n{SSH}""")
    end = run(spec(tmp_path, "first", "", (A, B)), environment, agents)
    assert (end.kind, end.hosts) == (EndKind.HOST, ("host-b",))
    assert "not started within 3 s" in end.cause


def stop_agent(tmp_path: Path, rank: int, fail: bool) -> None:
    """Stop the agent of a rank once all ranks run; then let rank 1 end, or not."""
    wait(lambda: all((tmp_path / f"first.{each}").exists() and facts(tmp_path, "first", each) for each in (0, 1)))
    os.kill(int(facts(tmp_path, "first", rank)[0]), signal.SIGSTOP)
    if fail:
        time.sleep(supervisor._SILENT_SECONDS + 0.5)
        (tmp_path / "go").touch()


@pytest.mark.slow
def test_agents_end_with_the_launcher_whatever_they_do(
    tmp_path: Path, environment: dict[str, str], agents: AgentProcesses
) -> None:
    begin_when_ready(tmp_path, agents)
    run(spec(tmp_path, "first", "fail", (A, B), (C,)), environment, agents)
    processes = [process.pid for process in agents.hosts.values()]
    assert len(processes) == 3
    agents.end_all()
    wait(lambda: not any(map(is_alive, processes)))


def test_orders_are_lines_that_may_arrive_in_pieces() -> None:
    first = LaunchSpec("first", (A, B), "::1", 1, "s.py", (), "/", "/", "/", sys.executable, spares=(C,))
    second = replace(first, run_id="second")
    orders = Orders()
    lines = encode_order(start_order(first)) + encode_order(end_order(first)) + encode_order(signal_order(0))
    for position in range(len(lines)):
        orders.feed(lines[position : position + 1])
    assert orders.next_start(0) == first
    assert orders.next_start(0) is None
    assert orders.say_to_end(first)
    assert not orders.say_to_end(second)
    assert [first.node_rank_of(name) for name in ("host-b", "host-c", "host-d")] == [1, 2, None]


def test_a_lost_host_is_given_up_when_the_others_have_answered(tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "ssh").write_text(f"""#!/bin/sh\ncase "$*" in *host-b*) exec sleep 60;; esac\n{SSH}""")
    described = spec(tmp_path, "first", "", (A, B))
    started = time.monotonic()
    reports = examine_hosts(described, HostChecks(seconds=50, always_ssh=True, lost=frozenset({"host-b"})), environment)
    assert time.monotonic() - started < 45
    assert reports[0].answer
    assert not reports[1].answer
    assert reports[1].problems
