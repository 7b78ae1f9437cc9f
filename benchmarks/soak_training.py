"""Small trainings of benchmarks/soak.py on this machine: their configurations, processes and files."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from neox.launch.agent.warm_start import RANK_NAME
from neox.run_events import read_events

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "tests" / "golden" / "data"
STEPS = 60
SAVE_EVERY = 4
HANG_SECONDS = 60  # longer than imports on a busy machine
WAIT_SECONDS = 300
MARK = "NEOX_SOAK_MARK"
_SHELLS = ("ssh", "sh", "bash")
_ROLES = {"rank": "neox.launch.agent.bootstrap", "agent": "neox.launch.agent.host_agent"}

DENSE: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 64,
    "max_position_embeddings": 64,
    "pos_emb": "rotary",
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "Adam", "params": {"lr": 0.001}},
    "tokenizer_type": "HFTokenizer",
    "vocab_file": str(DATA / "tokenizer.json"),
    "data_path": str(DATA / "small_text_document"),
    "train_iters": STEPS,
    "lr_decay_iters": STEPS,
    "checkpoint_factor": SAVE_EVERY,
    "keep_last_n_checkpoints": 3,
    "eval_interval": 20,
    "eval_iters": 1,
    "log_interval": 20,
    "num_gpus": 2,
    "distributed_backend": "gloo",
    "hang_timeout": HANG_SECONDS,
    "max_restarts": 1000,
}
_OFFLOAD = {"stage": 1, "offload_optimizer": {"device": "cpu"}}
LOCAL_SCENARIOS: dict[str, dict[str, Any]] = {
    "dense": {},
    "dense-async": {"async_save": True, "zero_optimization": {"stage": 1}},
    "tensor": {"model_parallel_size": 2, "precision": "bf16"},
    "gpt2-stages": {"pipe_parallel_size": 2, "pos_emb": "learned", "gradient_accumulation_steps": 2},
    "zero-2": {"zero_optimization": {"stage": 2}, "precision": "bf16", "async_save": True},
    "zero-3": {"zero_optimization": {"stage": 3}},
    "lora": {"lora": {"r": 4, "alpha": 8.0}},
    "offload": {"zero_optimization": _OFFLOAD},
    "experts": {"moe_num_experts": 4, "moe_top_k": 2},
    "one-rank": {"num_gpus": 1, "async_save": True},
    "bert": {"objective": "masked_lm", "bert_binary_head": False, "pos_emb": "learned"},
}
# Two hosts with one rank each. The elastic run has no dropout: fewer ranks would draw other random numbers.
HOST_SCENARIOS: dict[str, dict[str, Any]] = {
    "spare-host": {"doctor_timeout": 60},
    "elastic": {"doctor_timeout": 60, "elastic": True, "hidden_dropout": 0.0, "attention_dropout": 0.0},
}
SCENARIOS = {**LOCAL_SCENARIOS, **HOST_SCENARIOS}
_BERT_TOKENS = ("[CLS]", "[SEP]", "[MASK]")
_SLOW_DISK = "NEOX_SOAK_SLOW_DISK"
# Text of sitecustomize.py, which Python imports at startup. While the file named by the variable exists, each fsync
# takes half a second longer.
_SLOW_FSYNC = f"""
import os, time
fsync = os.fsync
def slow_fsync(descriptor):
    if os.path.exists(os.environ.get("{_SLOW_DISK}", "")):
        time.sleep(0.5)
    fsync(descriptor)
os.fsync = slow_fsync
"""


class Training:
    """One training. Its command may be run several times.

    Args:
        directory: Directory for its configuration, logs and checkpoints.
        scenario: Key in SCENARIOS.
        disk: Directory for the checkpoints on a disk of its own; None to save in `directory`.
    """

    def __init__(self, directory: Path, scenario: str, disk: Path | None = None) -> None:
        self.directory = directory
        self.run = directory / "run"
        self.save = (disk or directory) / "save"
        self.mark = uuid.uuid4().hex
        self.process: subprocess.Popen[bytes] | None = None
        directory.mkdir(parents=True, exist_ok=True)
        self.ranks: int = {**DENSE, **SCENARIOS[scenario]}["num_gpus"]
        keys = {**DENSE, **SCENARIOS[scenario], "save": str(self.save), "log_dir": str(self.run)}
        if keys.get("objective") == "masked_lm":
            keys["vocab_file"] = str(_write_vocabulary(directory / "tokenizer.json"))
        self.slow = directory / "slow"
        (directory / "injected").mkdir(exist_ok=True)
        (directory / "injected" / "sitecustomize.py").write_text(_SLOW_FSYNC)
        (directory / "soak.yml").write_text(json.dumps(keys, indent=1))

    def command(self) -> list[str]:
        """Return the command of the launcher."""
        return [sys.executable, str(ROOT / "deepy.py"), str(ROOT / "train.py"), str(self.directory / "soak.yml")]

    def environment(self) -> dict[str, str]:
        """Return the environment variables of the launcher."""
        paths = [str(self.directory / "injected"), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {
            **os.environ,
            MARK: self.mark,
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(paths),
            _SLOW_DISK: str(self.slow),
        }

    def start(self) -> None:
        """Run the command, for the first time or again."""
        with open(self.directory / "log", "ab") as log:
            self.process = subprocess.Popen(
                self.command(),
                env=self.environment(),
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def pids(self, role: str | None = None) -> list[int]:
        """Return the live processes of this training, with one role or all."""
        pids = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                environment = (entry / "environ").read_bytes().split(b"\0")
                is_alive = (entry / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
            except OSError:
                continue
            pid = int(entry.name)
            is_marked = f"{MARK}={self.mark}".encode() in environment
            if is_alive and is_marked and (role is None or has_role(pid, role)):
                pids.append(pid)
        return sorted(pids)

    def host_agents(self) -> list[int]:
        """Return the agents that have ranks. An agent is the parent process of its ranks."""
        parents = set()
        for pid in self.pids("rank"):
            with suppress(OSError):
                parents.add(int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]))
        return sorted(parents & set(self.pids("agent")))

    def starts(self) -> list[Mapping[str, Any]]:
        """Return the `start` events of the event log."""
        return [event for event in read_events(self.run) if event["event"] == "start"]

    def ends(self) -> list[Mapping[str, Any]]:
        """Return the `end` events of the event log."""
        return [event for event in read_events(self.run) if event["event"] == "end"]

    def losses(self) -> dict[int, float]:
        """Return the training loss of every step. A repeated step has the loss of its last repetition."""
        path = self.run / "metrics.jsonl"
        losses: dict[int, float] = {}
        if not path.exists():
            return losses
        for line in path.read_text().splitlines():
            if line.endswith("}"):
                row = json.loads(line)
                if row["kind"] == "step":
                    losses[row["iteration"]] = next(value for name, value in row.items() if name.startswith("train/"))
        return losses

    def step(self) -> int:
        """Return the last step in the metrics."""
        path = self.run / "metrics.jsonl"
        last = 0
        if path.exists():
            for line in path.read_text().splitlines()[-8:]:
                if line.endswith("}") and '"step"' in line:
                    last = json.loads(line)["iteration"]
        return last

    def checkpoints(self) -> list[int]:
        """Return the iterations of the committed checkpoints, the newest first."""
        names = [path.parent.name for path in self.save.glob("global_step*/manifest.json")]
        return sorted((int(name.removeprefix("global_step")) for name in names), reverse=True)

    def wait_for_start(self, earlier: int, what: str) -> None:
        """Wait until the ranks have been started more than `earlier` times, or the launcher has ended.

        Args:
            earlier: Number of earlier starts.
            what: Description of the start, for an error message.
        """
        wait(lambda: len(self.starts()) > earlier or self.ended(), what)

    def wait_for_step(self, step: int) -> None:
        """Wait until the metrics contain a step, or the launcher has ended."""
        wait(lambda: self.step() >= step or self.ended(), f"step {step}")

    def ended(self) -> bool:
        """Return whether the launcher has ended."""
        assert self.process is not None
        return self.process.poll() is not None

    def end(self) -> None:
        """Kill all remaining processes."""
        for pid in self.pids():
            kill_process(pid, signal.SIGKILL)
        if self.process is not None:
            self.process.kill()
            self.process.wait()


def has_role(pid: int, role: str) -> bool:
    """Return whether a process has a role (`rank` or `agent`). A warm process is a rank once it has become one."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
        name = Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return False
    if name in _SHELLS:  # it only runs the command of an agent
        return False
    if _ROLES[role] not in command:
        return False
    is_waiting = "--warm" in command and name != RANK_NAME
    return role != "rank" or not is_waiting


def kill_process(pid: int, number: int) -> bool:
    """Send a signal to a process. Return whether the process existed."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def _write_vocabulary(path: Path) -> Path:
    """Write the tokenizer of the data, with the special tokens of BERT added."""
    tokenizer = json.loads((DATA / "tokenizer.json").read_text())
    first = len(tokenizer["model"]["vocab"])
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    for number, token in enumerate(_BERT_TOKENS):
        tokenizer["added_tokens"].append({"id": first + number, "content": token, **flags})
    path.write_text(json.dumps(tokenizer))
    return path


class SoakError(Exception):
    """Error of a training that did not behave as expected."""


def wait(condition: Callable[[], Any], what: str, seconds: float = WAIT_SECONDS) -> Any:
    """Wait until a condition is true, and return its value. Raises SoakError after a number of seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.01)
    raise SoakError(f"no {what} within {seconds:.0f} s")


@contextmanager
def disk(path: Path) -> Iterator[Path | None]:
    """Yield a directory on a file system of its own; None if none can be mounted."""
    path.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", "size=128m", "tmpfs", str(path)]
    mounted = shutil.which("mount") is not None and subprocess.run(command, capture_output=True).returncode == 0
    try:
        yield path if mounted else None
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(path)], check=True)
        shutil.rmtree(path, ignore_errors=True)
