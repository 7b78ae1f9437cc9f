"""The job of docs/cluster.md under a real slurm: restarts in the job, a save before its end, a node that dies."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from neox.run_events import read_events
from tests.end_to_end.launched_runs import CPU_ONLY, ROOT, command_line, write_config
from tests.end_to_end.slurm_cluster import SlurmCluster, slurm_cluster, variables_of_processes, wait, why_not

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_not()), reason=why_not())]
DATA = ROOT / "tests" / "golden" / "data" / "small_text_document"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[SlurmCluster]:
    with slurm_cluster(tmp_path / "slurm") as started:
        yield started


class Job:
    """The page's job on two nodes without GPUs, with a small model."""

    def __init__(self, cluster: SlurmCluster, directory: Path) -> None:
        self.cluster = cluster
        self.directory = directory
        directory.mkdir()
        write_config(directory / "tiny.yml", directory / "run", 1)
        keys = {"data_path": DATA, "save": directory / "save", "checkpoint_factor": 100, "keep_last_n_checkpoints": 2}
        keys |= {"train_iters": 10**6, "lr_decay_iters": 10**6, "eval_iters": 1, "eval_interval": 10**6}
        keys |= {"master_addr": "127.0.0.1", "log_interval": 100}
        settings = " ".join(f"--set {key}={value}" for key, value in keys.items())
        page = (ROOT / "docs" / "cluster.md").read_text()
        script = page.partition("```bash\n")[2].partition("```")[0]
        script = re.sub(r"#SBATCH --(nodes|gpus-per-node|cpus-per-task|mem)=.*\n", "", script)
        script = script.replace("#!/bin/bash\n", "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --cpus-per-task=1\n")
        script, count = re.subn(
            r"exec .*deepy.py train.py -d configs \S+ \S+ slurm.yml (.*)",
            rf"exec {sys.executable} {ROOT}/deepy.py {ROOT}/train.py tiny.yml {ROOT}/configs/slurm.yml \1 {settings}",
            script,
        )
        assert count == 1
        (directory / "train.sbatch").write_text(script)
        self.number = ""

    def submit(self) -> None:
        self.cluster.environment |= CPU_ONLY
        printed = self.cluster.call("sbatch", "train.sbatch", cwd=self.directory)
        self.number = printed.split()[-1]

    def wait_for(self, step: int, seconds: float = 120) -> None:
        """Wait until a checkpoint of at least that step is there."""
        wait(lambda: self.saved_step() >= step or self.has_failed(), f"step {step}", seconds)
        assert not self.has_failed(), self.log()

    def has_failed(self) -> bool:
        return self.cluster.field(self.number, "JobState") == "FAILED"

    def saved_step(self) -> int:
        latest = self.directory / "save" / "latest"
        return int(latest.read_text().removeprefix("global_step")) if latest.exists() else 0

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_events(self.directory / "run") if event["event"] == kind]

    def ranks(self) -> list[int]:
        """Processes of ranks, without warm ones that wait."""
        found = []
        for pid, variables in variables_of_processes():
            command = command_line(pid)
            is_rank = "bootstrap" in command and "--warm" not in command
            if is_rank and f"NEOX_RUN_DIRECTORY={self.directory}/run" in variables:
                found.append(pid)
        return found

    def log(self) -> str:
        return "".join(path.read_text() for path in self.directory.glob("*.log"))[-3000:]


def test_a_killed_rank_and_a_job_that_is_about_to_end(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = Job(cluster, tmp_path / "job")
    job.submit()
    job.wait_for(100)
    os.kill(job.ranks()[-1], signal.SIGKILL)
    wait(lambda: len(job.events("start")) == 2, "restart")
    job.wait_for(job.saved_step() + 200)
    assert job.events("end")[0]["kind"] == "rank failed", job.log()
    cluster.call("scancel", "--signal=TERM", "--batch", job.number)  # as `--signal=B:TERM@600` does
    wait(lambda: cluster.field(job.number, "JobState") == "COMPLETED", "end of the job")
    assert job.events("end")[-1]["kind"] == "asked to end"
    assert job.saved_step() % 100 != 0, "it did not save when it was asked to end"
    assert not job.ranks()


@pytest.mark.timeout(600)
def test_a_node_that_dies_is_replaced(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = Job(cluster, tmp_path / "job")
    job.submit()
    job.wait_for(100)
    assert cluster.field(job.number, "NodeList") == "n[1-2]"
    cluster.kill_node("n2")
    wait(lambda: cluster.field(job.number, "JobState") == "PENDING", f"requeued job; {job.log()}", 120)
    saved = job.saved_step()
    cluster.call("scontrol", "update", f"JobId={job.number}", "StartTime=now")  # slurm would wait for two minutes
    job.wait_for(saved + 200)
    assert cluster.field(job.number, "NodeList") == "n[1,3]"
    assert job.events("start")[-1]["hosts"] == ["n1", "n3"]
    assert job.events("start")[-1]["step"] == saved
