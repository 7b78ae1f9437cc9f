"""Launchers that start one agent per host by themselves, behind stand-ins for srun and mpirun on PATH."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.launched_runs import CPU_ONLY, ROOT, LaunchedRun

DATA = ROOT / "tests" / "golden" / "data" / "small_text_document"

# Starts one copy of the command per host, as srun and mpirun do; the first failure is its own exit status. srun passes
# its standard input on to all of them, and mpirun some signals.
STAND_IN = f"""#!{sys.executable}
import os, signal, subprocess, sys, threading
name, words = os.path.basename(sys.argv[0]), sys.argv[1:]
variable = "SLURM_NODEID" if name == "srun" else "OMPI_COMM_WORLD_RANK"
command = words[words.index("env"):]
tasks = [subprocess.Popen(command, env={{**os.environ, variable: str(node)}}, stdin=-1) for node in range(2)]
def pass_input_on():
    while data := os.read(0, 65536):
        for task in tasks:
            os.write(task.stdin.fileno(), data)
    for task in tasks:
        task.stdin.close()
if name == "srun":
    threading.Thread(target=pass_input_on, daemon=True).start()
if name == "mpirun":
    signal.signal(signal.SIGALRM, lambda number, _: [task.send_signal(number) for task in tasks])
codes = [task.wait() for task in tasks]
sys.exit(next((code for code in codes if code), 0))
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A PATH with the stand-ins on it."""
    (tmp_path / "bin").mkdir()
    for name in ("srun", "mpirun"):
        (tmp_path / "bin" / name).write_text(STAND_IN)
        (tmp_path / "bin" / name).chmod(0o755)
    return f"{tmp_path / 'bin'}:{os.environ['PATH']}"


def test_one_agent_per_host(tmp_path: Path, path: str) -> None:
    (tmp_path / "hosts").write_text("a slots=2\nb slots=2\n")
    runs = {}
    for launcher, mode in (("slurm", "quick"), ("openmpi", "exit7")):
        arguments = ["-H", str(tmp_path / "hosts"), "--set", f"launcher={launcher}"]
        runs[mode] = LaunchedRun(tmp_path, arguments, ranks=None, PATH=path, NEOX_DUMMY=mode)
    output = runs["quick"].output(60)
    assert runs["quick"].process.returncode == 0, output
    logs = runs["quick"].directory / "run" / "ranks"
    assert sorted(str(log.relative_to(logs)) for log in logs.glob("*/rank_*")) == [
        "a/rank_0000.log",
        "a/rank_0001.log",
        "b/rank_0002.log",
        "b/rank_0003.log",
    ]
    output = runs["exit7"].output(60)
    assert runs["exit7"].process.returncode == 7, output
    assert "error: rank 3 on b " in output
    for run in runs.values():
        run.seconds_until_gone(5)


@pytest.mark.parametrize("launcher", ["slurm", "openmpi"])
def test_ranks_save_at_sigterm(launcher: str, tmp_path: Path, path: str) -> None:
    """srun and mpirun must not get the signal: they would kill the ranks."""
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\n")
    arguments = ["-H", str(tmp_path / "hosts"), "--set", f"launcher={launcher}"]
    run = LaunchedRun(tmp_path, arguments, ranks=None, PATH=path, NEOX_DUMMY="save")
    run.wait_up()
    run.process.terminate()
    output = run.output(30)
    assert run.process.returncode == 0, output
    logs = (run.directory / "run" / "ranks").glob("*/rank_*")
    assert ["saved" in log.read_text() for log in logs] == [True, True]
    run.seconds_until_gone(5)


def test_the_job_of_the_page_hands_its_signal_and_status_on(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "cluster.md").read_text()
    (tmp_path / "job").write_text(page.partition("```bash\n")[2].partition("```")[0])
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\ntrap 'exit 7' TERM\necho \"$PWD $SRUN_CPUS_PER_TASK $*\"\nread never\n")
    python.chmod(0o755)
    variables = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_CPUS_PER_TASK": "4"}
    job = subprocess.Popen(
        ["bash", str(tmp_path / "job")], stdin=-1, stdout=-1, text=True, env={**os.environ, **variables}
    )
    assert job.stdout is not None
    words = job.stdout.readline().split()
    assert words[:4] == [str(tmp_path), "4", "deepy.py", "train.py"]
    job.terminate()
    job.communicate(timeout=30)
    assert job.returncode == 7


def test_the_commands_of_none_start_the_same_ranks(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=1\nb slots=1\n")
    printing = LaunchedRun(tmp_path, ["-H", str(tmp_path / "hosts"), "--set", "launcher=none"], ranks=None)
    lines = [line for line in printing.output(30).splitlines() if "neox.launch.agent.host_agent" in line]
    assert printing.process.returncode == 0
    environment = {**os.environ, **CPU_ONLY, "NEOX_DUMMY": "exit7"}
    agents = [
        subprocess.Popen(
            ["sh", "-c", f"exec {line.partition('&& ')[2]}"], env=environment, stdout=-1, stderr=-1, text=True
        )
        for line in lines
    ]
    assert agents[1].communicate(timeout=60)[1].startswith("error: rank 1 on b ")
    assert agents[1].returncode == 7
    assert agents[0].stdout is not None
    assert agents[0].stdout.readline() == "rank 0 is up\n"
    agents[0].terminate()  # what a scheduler does with the other hosts
    agents[0].communicate(timeout=20)
    assert agents[0].returncode == 143
    assert printing.seconds_until_gone(5) < 5


def test_torchrun_trains_with_the_printed_line(tmp_path: Path) -> None:
    settings = ["launcher=none", "train_iters=2", "log_interval=1", f"data_path={DATA}"]
    printing = LaunchedRun(tmp_path, [word for each in settings for word in ("--set", each)], script=None)
    (line,) = [line for line in printing.output(30).splitlines() if "torch.distributed.run" in line]
    environment = {**os.environ, **CPU_ONLY}
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    metrics = (printing.directory / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(step)["iteration"] for step in metrics if "train/lm_loss" in step] == [1, 2]


def test_a_launcher_that_is_not_installed(tmp_path: Path) -> None:
    run = LaunchedRun(tmp_path, ["--set", "launcher=slurm"], PATH=str(tmp_path))
    assert "program srun" in run.output(30)
    assert run.process.returncode == 1
