"""Processes that have imported what ranks need, and become ranks at the next start of a run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from neox.config.sections.runner import RunnerConfig
from neox.launch import Host, LaunchSpec
from neox.launch.agent.warm_ranks import MAY_DIFFER, RankAssignment, WarmRanks
from neox.launch.agent.warm_start import RANK_NAME, WAITING_NAME
from neox.launch.processes import is_alive
from neox.launch.supervisor.agent_processes import AgentProcesses
from neox.launch.supervisor.launchers import launch

ROOT = Path(__file__).resolve().parents[3]
COMMAND = [sys.executable, "-m", "neox.launch.agent.bootstrap", "--warm", "json"]
SHOW = """
import json, os, sys
shown = {"words": sys.argv, "stdin": sys.stdin.read(), "directory": os.getcwd(), "environment": dict(os.environ)}
shown |= {"name": open("/proc/self/comm").read().strip(), "nice": os.getpriority(os.PRIO_PROCESS, 0)}
print(json.dumps(shown))
"""
# Prints the variables that are read by name while a rank's module is imported.
READS = f"""
import os, sys

read = set()
kind = type(os.environ)
getter = kind.__getitem__

def noted(self, name):
    if sys._getframe(1).f_code.co_name != "__iter__":  # of all items
        read.add(name)
    return getter(self, name)

os.environ |= dict.fromkeys({MAY_DIFFER!r}, "0")
kind.__getitem__ = noted
import neox.train
print(*read)
"""
# It fails at its first start, once the agent has a process that is ready to become the rank.
TRAINING = """
import os, sys, time
from pathlib import Path
from neox.launch import report_progress

print("parent", os.getppid(), "name", Path("/proc/self/comm").read_text().strip(), flush=True)
report_progress(1)
first = Path(sys.argv[1])
if first.exists():
    sys.exit(0)
first.touch()
while True:
    for path in Path("/proc").glob("[0-9]*/status"):
        try:
            lines = path.read_text().splitlines()
        except OSError:
            continue
        if "Name:\\tneox-warm" in lines and f"PPid:\\t{os.getppid()}" in lines:
            sys.exit(5)
    time.sleep(0.05)
"""


def wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def test_a_warm_process_becomes_the_rank_that_is_ordered(tmp_path: Path) -> None:
    (tmp_path / "show.py").write_text(SHOW)
    (tmp_path / "typed").write_text("hello")
    before = {**os.environ, "MASTER_PORT": "1"}
    warm = WarmRanks(COMMAND)
    try:
        warm.prepare(0, before, str(ROOT))
        variables = {**before, "MASTER_PORT": "2", "RANK": "3", "WORLD_SIZE": "4"}
        order = RankAssignment((str(tmp_path / "show.py"), "a", "b"), variables, str(tmp_path), str(tmp_path / "typed"))
        assert warm.take(1, order) is None  # a slot without one
        process = warm.take(0, order)
        assert process is not None
        assert process.stdout is not None
        shown = json.loads(process.stdout.read())
        assert process.wait() == 0
        assert warm.take(0, order) is None
    finally:
        warm.close()
    assert shown["words"] == [str(tmp_path / "show.py"), "a", "b"]
    assert (shown["stdin"], shown["directory"]) == ("hello", str(tmp_path))
    assert {name: shown["environment"][name] for name in variables} == variables
    assert (shown["name"], shown["nice"]) == (RANK_NAME, os.getpriority(os.PRIO_PROCESS, 0))


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "LOCAL_RANK"])
def test_a_variable_that_imports_may_have_read_must_be_the_same(name: str, tmp_path: Path) -> None:
    before = {**os.environ, name: "0"}
    warm = WarmRanks(["sleep", "600"])
    warm.prepare(0, before, str(tmp_path))
    pid = warm._waiting[0][0].pid
    assert warm.take(0, RankAssignment(("x.py",), {**before, name: "1"}, str(tmp_path), None)) is None
    assert not is_alive(pid)


@pytest.mark.slow
def test_no_import_reads_a_variable_that_may_differ() -> None:
    result = subprocess.run([sys.executable, "-c", READS], capture_output=True, text=True, cwd=ROOT, check=True)
    read = set(result.stdout.split())
    assert "HOME" in read  # by something
    assert not read & set(MAY_DIFFER)


def test_a_warm_process_ends_with_the_agent(tmp_path: Path) -> None:
    code = (
        "import os, time; from neox.launch.agent.warm_ranks import WarmRanks; "
        f"warm = WarmRanks({COMMAND!r}); warm.prepare(0, os.environ, '.'); "
        "print(warm._waiting[0][0].pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT) as agent:
        assert agent.stdout is not None
        pid = int(agent.stdout.readline())
        wait(lambda: name_of(pid) == WAITING_NAME)
        agent.kill()
    wait(lambda: not is_alive(pid))


def test_the_agent_stays_and_gives_the_next_start_to_its_warm_process(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    started = str(tmp_path / "started")

    def start(number: int, agents: AgentProcesses) -> int:
        host = (Host("localhost", (0,)),)
        names = (str(script), (started,), str(tmp_path), str(ROOT), str(tmp_path / "run"))
        run_id = f"{os.getpid()}-{number}-{tmp_path.name}"
        spec = LaunchSpec(run_id, host, "127.0.0.1", 20000 + number, *names, sys.executable, warm_module="json")
        return launch(spec, RunnerConfig(launcher="local"), os.environ, agents=agents).status

    with AgentProcesses() as agents:
        assert start(0, agents) == 5
        (agent,) = agents.processes
        assert start(1, agents) == 0
    assert agent.returncode == 0
    lines = [line.split() for line in capfd.readouterr().out.splitlines() if line.startswith("parent")]
    assert [line[1] for line in lines] == [str(agent.pid)] * 2
    assert [line[3] for line in lines][1] == RANK_NAME
    assert lines[0][3] != RANK_NAME


def test_an_agent_that_has_stayed_ends_with_the_launcher(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys; sys.exit(5)")
    host = (Host("localhost", (0,)),)
    names = (str(script), (), str(tmp_path), str(ROOT), str(tmp_path / "run"))
    run_id = f"{os.getpid()}-ends-{tmp_path.name}"
    spec = LaunchSpec(run_id, host, "127.0.0.1", 20000, *names, sys.executable, warm_module="json")
    with AgentProcesses() as agents:
        assert launch(spec, RunnerConfig(launcher="local"), os.environ, agents=agents).status == 5
        (agent,) = agents.processes
        assert agent.poll() is None
        os.kill(agent.pid, signal.SIGTERM)
        assert agent.wait(60) == 5
        other = LaunchSpec(f"{run_id}-2", host, "127.0.0.1", 20000, *names, sys.executable, warm_module="json")
        assert agents.restart_waiting(other) == [0]


def test_an_agent_that_stays_keeps_nothing_open(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys; sys.exit(5)")
    host = (Host("localhost", (0, 1)),)
    names = (str(script), (), str(tmp_path), str(ROOT), str(tmp_path / "run"))
    opened = []
    with AgentProcesses() as agents:
        for number in range(4):
            run_id = f"{os.getpid()}-open-{number}-{tmp_path.name}"
            spec = LaunchSpec(run_id, host, "127.0.0.1", 20000, *names, sys.executable, warm_module="json")
            assert launch(spec, RunnerConfig(launcher="local"), os.environ, agents=agents).status == 5
            wait(lambda: not list(Path(tempfile.gettempdir(), f"neox-{os.getuid()}").glob(f"{run_id}.*")))  # noqa: B023
            opened.append(len(os.listdir(f"/proc/{agents.processes[0].pid}/fd")))
    assert opened == [opened[0]] * 4
