"""`tools/sweep.py`: what is done is skipped, what was killed goes on, and one picture and table show all runs."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from neox.launch.processes import is_alive
from neox.metrics import curves
from tests.end_to_end.launched_runs import CPU_ONLY, ROOT, marked_pids, write_config
from tests.end_to_end.network_namespaces import TwoMachines, two_machines, why_not
from tools.sweep.progress import sweep_progress

DATA = ROOT / "tests" / "golden" / "data" / "small_text_document"
# Writes the metrics of a training whose last loss is its learning rate. It waits where a file asks it to.
TRAINING = """
import json, os, sys, time
from pathlib import Path
from neox.launch import Cause, FailureReport, host_name, report_failure
from neox.plan import decode_payload

config = decode_payload(sys.argv[sys.argv.index("--payload") + 1]).config
rate = config.to_flat()["optimizer"]["params"]["lr"]
directory = Path(config.logging.log_dir)
with (directory / "starts").open("a") as file:
    file.write(host_name() + "\\n")
if rate > 1:
    report_failure(FailureReport(Cause.NOT_FINITE, 2))
    sys.exit(1)
with (directory / "metrics.jsonl").open("w") as file:
    for step in range(1, config.training.train_iters + 1):
        row = {"iteration": step, "kind": "step", "train/lm_loss": rate + 10.0 - step, "train/batch_size": 2.0}
        row |= {"train/seq_length": 32.0, "runtime/iteration_time": 0.5, "runtime/tokens_per_sec": 128.0}
        file.write(json.dumps(row) + "\\n")
        file.flush()
        while step == 5 and Path(f"hold.{rate}").exists():
            time.sleep(0.05)
"""


class SweepCommand:
    """A sweep over learning rates in a directory, with a train.py of its own if `script` is given."""

    def __init__(self, directory: Path, rates: list[float], script: str | None = TRAINING) -> None:
        self.directory = directory
        self.mark = uuid.uuid4().hex
        directory.mkdir(exist_ok=True)
        if script is not None:
            (directory / "train.py").write_text(script)
        write_config(directory / "tiny.yml", directory / "unused", None)
        settings = f"set: {{data_path: {DATA}, launcher: local}}\n"
        (directory / "lr.yml").write_text(f"configs: [tiny.yml]\n{settings}grid: {{optimizer.params.lr: {rates}}}\n")

    def start(self, *arguments: str, prefix: tuple[str, ...] = (), **variables: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*prefix, sys.executable, str(ROOT / "tools" / "sweep.py"), "lr.yml", *arguments],
            env={**os.environ, **CPU_ONLY, "NEOX_TEST_MARK": self.mark, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.directory,
        )

    @property
    def results(self) -> Path:
        return self.directory / "runs" / "lr"

    def log_dir(self, rate: float) -> Path:
        return self.results / f"lr={rate}"

    def starts(self, rate: float) -> list[str]:
        """Hosts of the starts of a run."""
        file = self.log_dir(rate) / "starts"
        return file.read_text().split() if file.exists() else []

    def table(self) -> dict[str, dict[str, str]]:
        with (self.results / "table.csv").open() as file:
            return {row["run"]: row for row in csv.DictReader(file)}

    def end(self) -> None:
        for pid in marked_pids(self.mark):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def sweep(tmp_path: Path) -> Iterator[Callable[..., SweepCommand]]:
    made: list[SweepCommand] = []

    def make(*arguments: object, **keywords: object) -> SweepCommand:
        made.append(SweepCommand(tmp_path, *arguments, **keywords))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for command in made:
        command.end()


def wait_until(condition: Callable[[], object], seconds: float = 180) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_killed_sweep_goes_on_where_it_was(sweep: Callable[..., SweepCommand]) -> None:
    command = sweep([0.25, 2.0, 0.5])
    (command.directory / "hold.0.5").touch()
    killed = command.start()
    wait_until(lambda: command.starts(0.5) and "lr=0.5" in sweep_progress(command.results).live)
    progress = sweep_progress(command.results)
    assert (progress.state, progress.counts["done"], progress.counts["diverged"]) == ("running", 1, 1)
    assert progress.left is not None
    killed.kill()
    killed.communicate(timeout=20)
    wait_until(lambda: not marked_pids(command.mark), 20)  # its runs end with it
    progress = sweep_progress(command.results)
    assert (progress.state, progress.live) == ("stopped", {})
    assert {result.name for result in progress.results if result.cause} == {"lr=2.0"}
    (command.directory / "hold.0.5").unlink()
    again = command.start()
    output = again.communicate(timeout=90)[0]
    assert again.returncode == 0, output
    assert [len(command.starts(rate)) for rate in (0.25, 2.0, 0.5)] == [1, 1, 2]
    table = command.table()
    assert {name: row["state"] for name, row in table.items()} == {
        "lr=0.25": "done",
        "lr=0.5": "done",
        "lr=2.0": "diverged",
    }
    assert list(table) == ["lr=0.25", "lr=0.5", "lr=2.0"]  # the best first, those without a score last
    assert float(table["lr=0.25"]["train_loss"]) == 0.25  # the last tenth of ten steps
    assert (float(table["lr=0.25"]["tokens"]), float(table["lr=0.25"]["seconds"])) == (640, 5)
    assert "best: lr=0.25" in output
    assert (command.results / "sweep.png").read_bytes().startswith(b"\x89PNG")
    # Settings that change what is learned are refused, and name themselves.
    (command.directory / "tiny.yml").open("a").write("gradient_clipping: 0.5\n")
    refused = command.start()
    output = refused.communicate(timeout=30)[0]
    assert refused.returncode == 2, output
    assert "gradient_clipping" in output


@pytest.mark.slow
def test_a_training_that_was_interrupted_gives_the_same_losses(sweep: Callable[..., SweepCommand]) -> None:
    command = sweep([0.001], script=None)
    (command.directory / "lr.yml").write_text(
        (command.directory / "lr.yml").read_text().replace("set: {", "set: {train_iters: 40, checkpoint_factor: 5, ")
    )
    metrics = command.log_dir(0.001) / "metrics.jsonl"
    first = command.start()
    wait_until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 7, 120)
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=60)
    assert first.returncode == 128 + signal.SIGINT
    stopped_at = max(curves(metrics)["train/lm_loss"])
    assert stopped_at < 40
    again = command.start()
    output = again.communicate(timeout=200)[0]
    assert again.returncode == 0, output
    resumed = curves(metrics)["train/lm_loss"]
    redone = command.start("--redo", "lr=0.001")
    output = redone.communicate(timeout=200)[0]
    assert redone.returncode == 0, output
    assert curves(metrics)["train/lm_loss"] == resumed
    assert len(resumed) == 40


_REASON = why_not()


@pytest.mark.slow
@pytest.mark.netns
@pytest.mark.skipif(_REASON is not None, reason=_REASON or "")
def test_a_lost_host_costs_its_run_only(sweep: Callable[..., SweepCommand], tmp_path: Path) -> None:
    (tmp_path / "machines").mkdir()
    with two_machines(tmp_path / "machines") as machines:
        rates = [0.1, 0.2, 0.3, 0.4]
        command = sweep(rates)
        text = (command.directory / "lr.yml").read_text().replace("launcher: local", "doctor_timeout: 30")
        (command.directory / "lr.yml").write_text(text)
        for rate in rates[:2]:
            (command.directory / f"hold.{rate}").touch()
        hostfile = command.directory / "hosts"
        hostfile.write_text("".join(f"{host} slots=1\n" for host in machines.hosts))
        started = command.start("-H", str(hostfile), prefix=tuple(machines.inside([])), **machines.environment)
        wait_until(lambda: all(command.starts(rate) for rate in rates[:2]), 90)
        assert {command.starts(rate)[0] for rate in rates[:2]} == set(machines.hosts)  # one run on each
        (lost,) = [rate for rate in rates[:2] if command.starts(rate) == [machines.hosts[1]]]
        cut_off(machines)
        for rate in rates[:2]:
            (command.directory / f"hold.{rate}").unlink()
        output = started.communicate(timeout=240)[0]
        assert started.returncode == 0, output
        hosts = {rate: command.starts(rate) for rate in rates}
        assert hosts.pop(lost) == [machines.hosts[1], machines.hosts[0]]
        assert set(map(tuple, hosts.values())) == {(machines.hosts[0],)}
        assert {row["state"] for row in command.table().values()} == {"done"}
        assert f"{machines.hosts[1]} is lost" in output


def cut_off(machines: TwoMachines) -> None:
    """End everything on the second machine at once, and its cable with it, as if its power had failed."""
    subprocess.run(["ip", "-n", machines.names[1], "link", "set", "eth0", "down"], check=True)
    for pid in machines.pids(machines.names[1:2]):
        if is_alive(pid):
            os.kill(pid, signal.SIGKILL)
