"""Two runs that would write one directory: the second is refused, and told who was first."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

from tests.end_to_end.launched_runs import CPU_ONLY, ROOT, LaunchedRun

DATA = ROOT / "tests" / "golden" / "data" / "small_text_document"


def test_two_trainings_with_one_save(tmp_path: Path, runs: list[LaunchedRun]) -> None:
    save = tmp_path / "checkpoints"
    arguments = ["--set", f"save={save}", "--set", f"data_path={DATA}"]
    arguments += ["--set", "train_iters=100000"]  # the first one goes on while the second one starts
    first = LaunchedRun(tmp_path, arguments, script=None)
    runs.append(first)
    deadline = time.monotonic() + 60
    while not (save / ".run.lock").exists() or not (save / ".run.lock").read_text():
        assert time.monotonic() < deadline
        assert first.process.poll() is None, first.output()
        time.sleep(0.05)
    second = LaunchedRun(tmp_path, arguments, script=None)  # with a run directory of its own
    runs.append(second)
    output = second.output(120)  # the first one takes the processors
    assert second.process.returncode == 1
    assert f"save: {save} " in output
    assert f"train.py (process {first.process.pid} on " in output
    assert not second.pids()
    assert first.process.poll() is None


def test_an_agent_without_a_head_process_holds_the_run_directory(tmp_path: Path, runs: list[LaunchedRun]) -> None:
    printing = LaunchedRun(tmp_path, ["--set", "launcher=none"], ranks=1)
    runs.append(printing)
    line = next(line for line in printing.output().splitlines() if "neox.launch.agent.host_agent" in line)
    command = ["sh", "-c", f"exec {line.partition('&& ')[2]}"]
    environment = {**os.environ, **CPU_ONLY, "NEOX_TEST_MARK": printing.mark}
    agents = []
    for _ in range(2):
        agents.append(subprocess.Popen(command, env=environment, stdout=-1, stderr=subprocess.STDOUT, text=True))
        assert agents[-1].stdout is not None
        said = agents[-1].stdout.readline()
    assert f"{printing.directory / 'run'} " in said
    assert f"dummy.py (process {agents[0].pid} on " in said
    assert agents[1].wait(20) == 1
    assert agents[0].poll() is None
    agents[0].terminate()
    assert "error" not in agents[0].communicate(timeout=20)[0]  # it was asked to
    assert agents[0].returncode == 128 + signal.SIGTERM
