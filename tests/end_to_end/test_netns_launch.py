"""Two machines joined by a network: real pdsh, ssh and gloo, 2 x 2 ranks, and everything that can go wrong."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from neox.config import NeoXConfig
from neox.plan import config_from_files, encode_payload, resolve
from neox.tokenizer import build_tokenizer
from tests.distributed.spawn import run_script
from tests.end_to_end.launched_runs import DUMMY_RANK, ROOT, LaunchedRun, command_line
from tests.end_to_end.network_namespaces import TwoMachines, two_machines, why_not

_REASON = why_not()
pytestmark = [pytest.mark.netns, pytest.mark.skipif(_REASON is not None, reason=_REASON or "")]

GLOO_RANK = """
import os, sys, time
import torch, torch.distributed as dist

dist.init_process_group("gloo")
value = torch.ones(1) * dist.get_rank()
dist.all_reduce(value)
secret = len(os.environ.get("WANDB_API_KEY", ""))
print("[rank %d] is up: sum %d, %d, odd %r" % (dist.get_rank(), value, secret, os.environ.get("NEOX_ODD")), flush=True)
while os.environ.get("NEOX_DUMMY") == "loop":
    time.sleep(0.05)
    dist.all_reduce(value)
dist.destroy_process_group()
"""
DATA = ROOT / "tests" / "golden" / "data" / "small_text_document"
ODD = "a;touch pwned $(touch pwned) `touch pwned` 'single' \"double\" -dash\nline %h %n"


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoMachines]:
    with two_machines(tmp_path_factory.mktemp("machines")) as both:
        yield both


def launch(
    machines: TwoMachines, directory: Path, *, script: str = DUMMY_RANK, set_: Sequence[str] = (), **variables: str
) -> LaunchedRun:
    """A run over both machines, two ranks each, started on the first."""
    hostfile = directory / "hostfile"
    directory.mkdir(parents=True, exist_ok=True)
    hostfile.write_text("".join(f"{host} slots=2\n" for host in machines.hosts))
    settings = ["doctor_timeout=30", *set_]
    arguments = ["-H", str(hostfile), *(word for setting in settings for word in ("--set", setting))]
    environment = {**machines.environment, **variables}
    return LaunchedRun(directory, arguments, ranks=None, script=script, prefix=machines.inside([]), **environment)


def wait_until_gone(machines: TwoMachines, seconds: float = 10) -> None:
    """Nothing runs on either machine but the daemons."""
    deadline = time.monotonic() + seconds
    while left := machines.pids():
        assert time.monotonic() < deadline, [command_line(pid) for pid in left]
        time.sleep(0.05)


def test_a_gloo_job_and_odd_values(machines: TwoMachines, tmp_path: Path) -> None:
    directory = tmp_path / "it's; $(touch pwned) `touch pwned` %h"
    run = launch(machines, directory, script=GLOO_RANK, NEOX_ODD=ODD, WANDB_API_KEY="sesame")
    output = run.output(90)
    assert run.process.returncode == 0, output
    for rank in range(4):
        words = f"[rank {rank}] is up: sum 6, 6, odd {ODD!r}"  # 6 is also the length of the secret
        assert words in output
        log = run.directory / "run" / "ranks" / machines.hosts[rank // 2] / f"rank_{rank:04d}.log"
        assert "sum 6" in log.read_text()
    written = [path.read_bytes() for path in run.directory.rglob("*") if path.is_file()]
    assert not any(b"sesame" in content for content in [*written, output.encode()])
    assert not list(tmp_path.rglob("pwned"))
    wait_until_gone(machines)


@pytest.mark.slow
def test_a_rank_killed_on_the_other_machine(machines: TwoMachines, tmp_path: Path) -> None:
    run = launch(machines, tmp_path, script=GLOO_RANK, NEOX_DUMMY="loop")
    run.wait_up(4, 90)
    killed = time.monotonic()
    os.kill(run.rank_pid(3), signal.SIGKILL)
    output = run.output(15)
    assert time.monotonic() - killed < 10
    assert run.process.returncode == 128 + signal.SIGKILL, output
    assert f"error: rank 3 on {machines.hosts[1]} ended with signal 9 (SIGKILL)" in output
    wait_until_gone(machines, 2)


@pytest.mark.slow
def test_killing_the_launcher_pdsh_ssh_or_an_agent(machines: TwoMachines, tmp_path: Path) -> None:
    roles = ("launcher", "pdsh", "ssh", "agent")
    runs = [launch(machines, tmp_path / role) for role in roles]
    for run in runs:
        run.wait_up(4, 90)
    for run, role in zip(runs, roles, strict=True):
        if role == "launcher":
            pid = run.process.pid
        elif role == "agent":
            pid = parent(run.pids("rank")[-1])
        else:
            pid = next(pid for pid in run.pids() if command_line(pid).startswith(role))
        os.kill(pid, signal.SIGKILL)
    wait_until_gone(machines)
    for run, role in zip(runs, roles, strict=True):
        output = run.output(10)
        assert run.process.returncode != 0, (role, output)


@pytest.mark.slow
def test_a_signal_and_a_stopped_rank(machines: TwoMachines, tmp_path: Path) -> None:
    saving = launch(machines, tmp_path / "saving", NEOX_DUMMY="save")
    hanging = launch(machines, tmp_path / "hanging", set_=["hang_timeout=6"])
    saving.wait_up(4, 90)
    hanging.wait_up(4, 90)
    os.kill(hanging.rank_pid(2), signal.SIGSTOP)
    saving.process.send_signal(signal.SIGTERM)
    output = saving.output(15)
    assert saving.process.returncode == 0, output
    assert all(f"[rank {rank}] saved" in output for rank in range(4))
    output = hanging.output(30)
    assert hanging.process.returncode == 124, output
    for rank in range(4):
        assert output.count(f"stacks of rank {rank} on {machines.hosts[rank // 2]}") == 1
    assert output.count("dummy.py") == 3
    assert "the process is stopped" in output
    wait_until_gone(machines, 2)


@pytest.mark.slow
def test_a_network_that_is_cut(machines: TwoMachines, tmp_path: Path) -> None:
    """No end of any connection arrives: both sides give up after 30 seconds."""
    run = launch(machines, tmp_path)
    run.wait_up(4, 90)
    cut = time.monotonic()
    cable = ["ip", "-n", machines.names[1], "link", "set", "eth0"]
    subprocess.run([*cable, "down"], check=True)
    try:
        while [pid for pid in machines.pids() if "sshd: " not in command_line(pid)]:  # those wait for the network
            assert time.monotonic() - cut < 45
            time.sleep(0.1)
        assert time.monotonic() - cut > 20  # a switch that restarts quickly ends nothing
        assert f"error: lost {machines.hosts[1]}" in run.output(10)
        assert run.process.returncode == 1
    finally:
        subprocess.run([*cable, "up"], check=True)
    wait_until_gone(machines, 60)


@pytest.mark.slow
def test_an_agent_that_is_stopped(machines: TwoMachines, tmp_path: Path) -> None:
    """Its connection is as it was, but it sends nothing for 35 seconds. It cannot end its ranks itself."""
    run = launch(machines, tmp_path)
    run.wait_up(4, 90)
    os.kill(parent(run.rank_pid(3)), signal.SIGSTOP)
    output = run.output(60)
    assert f"error: lost {machines.hosts[1]} (nothing heard for 35 s)" in output
    assert run.process.returncode == 1
    wait_until_gone(machines, 2)


def test_hosts_that_cannot_take_part(machines: TwoMachines, tmp_path: Path) -> None:
    dead = machines.hosts[0].removesuffix("1") + "77"
    (tmp_path / "empty").mkdir()
    without_python = machines.add_machine(3, instead=tmp_path / "empty", of=Path(sys.executable).parent)
    old = shutil.copytree(ROOT / "neox", tmp_path / "neox", ignore=shutil.ignore_patterns("__pycache__"))
    (old / "log.py").write_text((old / "log.py").read_text() + "# another version\n")
    other_code = machines.add_machine(4, instead=old, of=ROOT / "neox")
    hostfile = tmp_path / "hostfile"
    hosts = (*machines.hosts, dead, without_python, other_code)
    hostfile.write_text("".join(f"{host} slots=2\n" for host in hosts))
    prefix = machines.inside([])
    run = LaunchedRun(tmp_path, ["-H", str(hostfile)], None, prefix=prefix, **machines.environment)
    output = run.output(30)
    assert run.process.returncode == 1
    assert time.monotonic() - run.started < 15  # the checks themselves end after 8
    assert "nothing was started" in output
    assert f"{dead}: ssh failed" in output
    assert f"{without_python}: no Python at" in output
    assert f"{other_code}: the project's code" in output
    for host in machines.hosts:
        assert f"\n{host}: " not in output
    assert "first thing to fix, on " in output
    assert not list(tmp_path.rglob("rank_*.log"))
    wait_until_gone(machines)


@pytest.mark.slow
@pytest.mark.parametrize("slots", [1, 2])
def test_training_with_stages_on_both_machines(machines: TwoMachines, tmp_path: Path, slots: int) -> None:
    """A stage on each machine, each of `slots` data-parallel ranks: the losses of one rank."""
    hostfile = tmp_path / "hosts"
    hostfile.write_text("".join(f"{host} slots={slots}\n" for host in machines.hosts))
    keys = {"train_iters": 4, "data_path": str(DATA), "log_interval": 1}
    settings = ["doctor_timeout=30", "pipe_parallel_size=2", *(f"{key}={value}" for key, value in keys.items())]
    arguments = ["-H", str(hostfile), *(word for setting in settings for word in ("--set", setting))]
    run = LaunchedRun(tmp_path, arguments, None, None, machines.inside([]), **machines.environment)
    output = run.output(240)
    assert run.process.returncode == 0, output
    config = config_from_files([run.directory / "tiny.yml"])
    one = {**config.to_flat(), **keys, "gradient_accumulation_steps": slots, "log_dir": str(tmp_path / "one")}
    vocabulary = build_tokenizer("HFTokenizer", config.tokenizer.vocab_file).vocab_size
    payload = encode_payload(resolve(NeoXConfig.from_flat(one), 1, vocabulary))
    done = run_script(ROOT / "train.py", "--payload", payload, directory=tmp_path)
    assert done.returncode == 0, done.stderr
    curves = []
    for directory in (run.directory / "run", tmp_path / "one"):
        lines = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
        curves.append([line["train/lm_loss"] for line in lines if "train/lm_loss" in line])
    assert len(curves[0]) == 4
    assert curves[0] == pytest.approx(curves[1], rel=1e-6)
    wait_until_gone(machines)


@pytest.mark.slow
def test_layouts_are_measured_on_both_machines(machines: TwoMachines, tmp_path: Path) -> None:
    """`--suggest --measure` starts its runs on the hosts of the hostfile, and leaves nothing."""
    hostfile = tmp_path / "hosts"
    hostfile.write_text("".join(f"{host} slots=1\n" for host in machines.hosts))
    arguments = ["--suggest", "--measure", "1", "--suggest-output", "best.yml", "-H", str(hostfile)]
    for setting in ("doctor_timeout=30", "precision=fp32", f"data_path={DATA}", "train_iters=20"):
        arguments += ["--set", setting]
    run = LaunchedRun(tmp_path, arguments, None, None, machines.inside([]), **machines.environment)
    output = run.output(400)
    assert run.process.returncode == 0, output
    _, _, measured = output.partition("median time")
    assert measured, output
    assert "failed" not in measured
    assert (run.directory / "best.yml").exists()
    assert not list(run.directory.glob("*-measured-*"))
    wait_until_gone(machines)


@pytest.mark.slow
def test_copies_of_weights_in_each_machine(machines: TwoMachines, tmp_path: Path) -> None:
    """ZeRO 3 over both machines with second copies of the weights in each: the losses without copies."""
    hostfile = tmp_path / "hosts"
    hostfile.write_text("".join(f"{host} slots=2\n" for host in machines.hosts))
    keys = [f"data_path={DATA}", "train_iters=4", "log_interval=1", "gradient_accumulation_steps=2"]
    curves = []
    for copies in ("null", "2"):
        zero = ["zero_optimization.stage=3", f"zero_optimization.zero_hpz_partition_size={copies}"]
        zero.append("zero_optimization.stage3_param_persistence_threshold=0")
        arguments = ["-H", str(hostfile)]
        for setting in ("doctor_timeout=30", *keys, *zero):
            arguments += ["--set", setting]
        run = LaunchedRun(tmp_path / copies, arguments, None, None, machines.inside([]), **machines.environment)
        output = run.output(240)
        assert run.process.returncode == 0, output
        lines = map(json.loads, (run.directory / "run" / "metrics.jsonl").read_text().splitlines())
        curves.append([line["train/lm_loss"] for line in lines if "train/lm_loss" in line])
    assert len(curves[0]) == 4
    assert curves[1] == pytest.approx(curves[0], rel=2e-6)
    wait_until_gone(machines)


def parent(pid: int) -> int:
    """The parent of a process."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
