"""Runs of `deepy.py` with cheap dummy ranks: starting them, finding their processes, waiting for their end."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from neox.launch.agent.warm_start import IMPORTING_NAME, WAITING_NAME

ROOT = Path(__file__).resolve().parents[2]
ROLES = {
    "launcher": "deepy.py",
    "agent": "neox.launch.agent.host_agent",
    "watchdog": "neox.launch.agent.watchdog",
    "rank": "neox.launch.agent.bootstrap",
}
CPU_ONLY = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}  # CPU ranks, on a machine with GPUs too

DUMMY_RANK = """
import os, signal, subprocess, sys, time

rank = int(os.environ["RANK"])
mode = os.environ.get("NEOX_DUMMY", "sleep")
if os.environ.get("NEOX_DUMMY_CHILD"):
    subprocess.Popen(["sleep", "600"])
print(f"rank {rank} is up", flush=True)

def stopped(signum, frame):
    if mode == "answer":
        from neox.launch import acknowledge_stop
        acknowledge_stop()
        time.sleep(9)
    print(f"[rank {rank}] saved", flush=True)
    sys.exit(0 if signum == signal.SIGTERM else 128 + signum)

if mode in ("save", "answer"):
    signal.signal(signal.SIGTERM, stopped)
    signal.signal(signal.SIGINT, stopped)
if mode == "stubborn" and rank == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
if mode == "late":
    signal.signal(signal.SIGINT, stopped)
    if rank == 1:
        from neox.launch import busy_saving
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # as if C code waited for a disk
        with busy_saving():
            while signal.SIGINT not in signal.sigpending():
                time.sleep(0.1)
            time.sleep(7)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
if mode == "quick":
    sys.exit(0)
if rank == int(os.environ.get("WORLD_SIZE", 1)) - 1:
    if mode == "raise":
        time.sleep(0.5)
        try:
            {}["first"]
        except KeyError:
            raise ValueError("the reason of rank 1")
    if mode == "fill":
        held = [bytearray(os.urandom(2**20)) for _ in range(2**14)]
    if mode.startswith("exit"):
        sys.exit(int(mode[4:]))
    if mode == "segfault":
        import faulthandler
        faulthandler._sigsegv()
for _ in range(600):
    time.sleep(1)
"""


class LaunchedRun:
    """One `deepy.py` process and everything it started, found by a mark in the environment."""

    def __init__(
        self,
        directory: Path,
        arguments: Sequence[str] = (),
        ranks: int | None = 2,
        script: str | None = DUMMY_RANK,
        prefix: Sequence[str] = (),
        name: str = "dummy.py",
        **variables: str,
    ) -> None:
        self.mark = uuid.uuid4().hex
        self.directory = directory / self.mark
        self.directory.mkdir(parents=True)
        if script is not None:
            (self.directory / name).write_text(script)
        write_config(self.directory / "tiny.yml", self.directory / "run", ranks)
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            [*prefix, *deepy_command(self.directory, arguments)],
            env={**os.environ, **CPU_ONLY, "NEOX_TEST_MARK": self.mark, **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.directory,
        )

    def pids(self, role: str | None = None) -> list[int]:
        """Processes of this run that live, of one role or all."""
        return marked_pids(self.mark, role)

    def rank_pid(self, rank: int) -> int:
        """The process of one rank. One that waits to become it has the same variables, and may have a lower id."""
        for pid in self.pids("rank"):
            if Path(f"/proc/{pid}/comm").read_text().strip() in (IMPORTING_NAME, WAITING_NAME):
                continue
            if f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                return pid
        raise AssertionError(f"rank {rank} does not run")

    def wait_up(self, ranks: int = 2, seconds: float = 60) -> None:
        """Wait until every rank has said that it is up."""
        logs = self.directory / "run" / "ranks"
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            up = sum("is up" in log.read_text() for log in logs.glob("*/rank_*.log"))
            if up == ranks:
                return
            if self.process.poll() is not None:
                raise AssertionError(f"the run ended early: {self.output()}")
            time.sleep(0.05)
        raise AssertionError(f"{ranks} ranks did not start in {seconds} s; {self.pids()}")

    def output(self, timeout: float = 30) -> str:
        """Everything printed, once the launcher has ended."""
        return self.process.communicate(timeout=timeout)[0]

    def seconds_until_gone(self, limit: float = 20) -> float:
        """Seconds until no process of this run lives; raises if that takes longer than `limit`."""
        started = time.monotonic()
        while left := self.pids():
            if time.monotonic() - started > limit:
                raise AssertionError(f"still alive after {limit} s: {[command_line(pid) for pid in left]}")
            time.sleep(0.05)
        return time.monotonic() - started

    def end(self) -> None:
        """Kill whatever is left (after a failed test)."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)


def deepy_command(directory: Path, arguments: Sequence[str] = ()) -> list[str]:
    """`deepy.py dummy.py tiny.yml` (or a dummy train.py, else the real one) with further arguments."""
    scripts = [directory / "dummy.py", directory / "train.py", ROOT / "train.py"]
    script = next(path for path in scripts if path.exists())
    return [sys.executable, str(ROOT / "deepy.py"), str(script), str(directory / "tiny.yml"), *arguments]


def write_config(path: Path, run_directory: Path, ranks: int | None) -> None:
    """A configuration that resolves for any number of ranks."""
    tokenizer = ROOT / "tests" / "golden" / "data" / "tokenizer.json"
    count = f"num_gpus: {ranks}\n" if ranks else ""
    path.write_text(
        f"num_layers: 2\nhidden_size: 32\nnum_attention_heads: 2\nseq_length: 32\nmax_position_embeddings: 32\n"
        f"pipe_parallel_size: 1\nmodel_parallel_size: 1\npos_emb: rotary\ndistributed_backend: gloo\n{count}"
        f"hidden_dropout: 0\nattention_dropout: 0\n"
        f"train_micro_batch_size_per_gpu: 1\ntrain_iters: 10\nlr_decay_iters: 10\n"
        f"optimizer:\n  type: Adam\n  params:\n    lr: 0.001\n"
        f"tokenizer_type: HFTokenizer\nvocab_file: {tokenizer}\nlog_dir: {run_directory}\n"
    )


def marked_pids(mark: str, role: str | None = None) -> list[int]:
    """Living processes with a mark in their environment, zombies left out."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            marked = f"NEOX_TEST_MARK={mark}".encode() in (entry / "environ").read_bytes().split(b"\0")
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            continue
        if marked and state not in "ZX" and (role is None or ROLES[role] in command_line(int(entry.name))):
            found.append(int(entry.name))
    return sorted(found)


def command_line(pid: int) -> str:
    """The start of a process's command line."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:150]
    except OSError:
        return ""
