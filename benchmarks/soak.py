"""Soak of runs that heal themselves: random faults in trainings, until they end exactly as undisturbed ones.

    benchmarks/soak.py --faults 300 --out soak.json [--seed 0] [--work DIRECTORY] [--minutes M] [--scenario NAME ...]

Each training is `deepy.py train.py` on this machine, one or two ranks of a small network in one of SCENARIOS.
Faults come at random steps: a rank, an agent or the launcher is killed (SIGKILL), a rank is killed while process groups
are set up or while the disk is slow (each fsync takes longer), a rank is stopped (SIGSTOP), a bit of the newest
checkpoint is flipped and then a rank killed, the disk is filled. After a fault that the launcher does not survive, or
that ends the run, the same command is typed again.

Checked after each: the run goes on from a checkpoint at least as new as the newest one before the fault (after a
flipped bit: the one before it). At the end: no process is left, and the loss of every step is that of the undisturbed
run, bit for bit. Network of the hosts, and layouts that change: tests/end_to_end/test_netns_healing.py.

Everything follows from the seed and the number of a training, but not the moments inside a step. Results are written
after each training; the same command with the same --out goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from neox.launch.warm_start import RANK_NAME
from neox.run_events import read_events

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "tests" / "golden" / "data"
STEPS = 60
SAVE_EVERY = 4
FAULTS_OF_TRAINING = 5
HANG_SECONDS = 60  # longer than imports on a busy machine
WAIT_SECONDS = 300
MARK = "NEOX_SOAK_MARK"
_LISTEN = "0A"  # the kernel's number of this state of a socket
_ROLES = {"rank": "neox.launch.bootstrap", "agent": "neox.launch.node"}

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
SCENARIOS: dict[str, dict[str, Any]] = {
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
FAULTS = ("rank", "rank", "rank", "set-up", "agent", "launcher", "flip", "full", "stop", "slow")
_BERT_TOKENS = ("[CLS]", "[SEP]", "[MASK]")
_SLOW_DISK = "NEOX_SOAK_SLOW_DISK"
# Python imports this file at its start. While the named file exists, each fsync takes half a second longer.
_SLOW_FSYNC = f"""
import os, time
fsync = os.fsync
def slow_fsync(descriptor):
    if os.path.exists(os.environ.get("{_SLOW_DISK}", "")):
        time.sleep(0.5)
    fsync(descriptor)
os.fsync = slow_fsync
"""


@dataclass
class Result:
    """Result of one training.

    Attributes:
        number: Its number.
        scenario: Its key in SCENARIOS.
        faults: Faults that took place, in order.
        starts: Number of starts of its ranks.
        problems: What went wrong.
        seconds: How long it took.
    """

    number: int
    scenario: str
    faults: list[str] = field(default_factory=list)
    starts: int = 0
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Training:
    """One training, which may take several launchers.

    Args:
        directory: Directory for its configuration, logs and checkpoints.
        scenario: Key in SCENARIOS.
        disk: Directory on a disk of its own for the checkpoints; None for one in `directory`.
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

    def start(self) -> None:
        """Type the command, the first time or again."""
        environment = {**os.environ, MARK: self.mark, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        paths = [str(self.directory / "injected"), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment |= {"PYTHONPATH": os.pathsep.join(paths), _SLOW_DISK: str(self.slow)}
        command = [sys.executable, str(ROOT / "deepy.py"), str(ROOT / "train.py"), str(self.directory / "soak.yml")]
        with open(self.directory / "log", "ab") as log:
            self.process = subprocess.Popen(
                command, env=environment, cwd=self.directory, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def pids(self, role: str | None = None) -> list[int]:
        """Return the living processes of this training, of one role or all."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                environment = (entry / "environ").read_bytes()
                words = (entry / "cmdline").read_bytes().decode(errors="replace")
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                name = (entry / "comm").read_text().strip()
            except OSError:
                continue
            if f"{MARK}={self.mark}".encode() not in environment.split(b"\0") or state in "ZX":
                continue
            waits = role == "rank" and "--warm" in words and name != RANK_NAME  # it has not become a rank yet
            if role is None or (_ROLES[role] in words and not waits):
                found.append(int(entry.name))
        return sorted(found)

    def starts(self) -> list[Mapping[str, Any]]:
        """Return the events of the starts of ranks."""
        return [event for event in read_events(self.run) if event["event"] == "start"]

    def ends(self) -> list[Mapping[str, Any]]:
        """Return the events of the ends of ranks."""
        return [event for event in read_events(self.run) if event["event"] == "end"]

    def losses(self) -> dict[int, float]:
        """Return the trained loss of every step; of one that was done again, the last."""
        path = self.run / "metrics.jsonl"
        found: dict[int, float] = {}
        if not path.exists():
            return found
        for line in path.read_text().splitlines():
            if line.endswith("}"):
                row = json.loads(line)
                if row["kind"] == "step":
                    found[row["iteration"]] = next(value for name, value in row.items() if name.startswith("train/"))
        return found

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

    def ended(self) -> bool:
        """Return whether the launcher has ended."""
        assert self.process is not None
        return self.process.poll() is not None

    def end(self) -> None:
        """Kill whatever is left."""
        for pid in self.pids():
            _kill(pid, signal.SIGKILL)
        if self.process is not None:
            self.process.kill()
            self.process.wait()


def _write_vocabulary(path: Path) -> Path:
    """Write the tokenizer of the data, with the special tokens of BERT added."""
    tokenizer = json.loads((DATA / "tokenizer.json").read_text())
    first = len(tokenizer["model"]["vocab"])
    usual = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    for number, token in enumerate(_BERT_TOKENS):
        tokenizer["added_tokens"].append({"id": first + number, "content": token, **usual})
    path.write_text(json.dumps(tokenizer))
    return path


class SoakError(Exception):
    """What went wrong in a training."""


def wait(condition: Callable[[], Any], what: str, seconds: float = WAIT_SECONDS) -> Any:
    """Return the first true value of a condition. Raises SoakError if there is none in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.01)
    raise SoakError(f"no {what} within {seconds:.0f} s")


def undisturbed(work: Path, scenario: str) -> dict[int, float]:
    """Return the losses of a scenario without faults, which is trained once."""
    kept = work / f"undisturbed-{scenario}.json"
    if not kept.exists():
        training = Training(work / f"undisturbed-{scenario}", scenario)
        training.start()
        try:
            wait(training.ended, "end of the undisturbed run")
        finally:
            training.end()
        losses = training.losses()
        if len(losses) != STEPS:
            raise SoakError(f"the undisturbed run of {scenario} failed: see {training.directory / 'log'}")
        kept.write_text(json.dumps(losses))
        shutil.rmtree(training.directory)
    return {int(step): loss for step, loss in json.loads(kept.read_text()).items()}


def train_with_faults(work: Path, number: int, scenario: str, faults: Sequence[str], seed: int) -> Result:
    """Train a scenario with faults at random steps.

    Args:
        work: Directory for files.
        number: Number of the training.
        scenario: Key in SCENARIOS.
        faults: Names of the faults, in order.
        seed: Seed of the soak.
    """
    result = Result(number, scenario)
    started = time.monotonic()
    generator = random.Random(f"{seed} {number} moments")
    directory = work / f"training-{number}"
    with disk(work / f"disk-{number}") as mounted:
        training = Training(directory, scenario, mounted)
        try:
            expected = undisturbed(work, scenario)
            _disturb(training, faults, generator, result)
            wait(training.ended, "end of the run")
            if training.process is not None and training.process.returncode:
                raise SoakError(f"the run ended with status {training.process.returncode}")
            if left := training.pids():
                raise SoakError(f"processes are left: {left}")
            if training.losses() != expected:
                raise SoakError("losses differ from those of the undisturbed run")
        except SoakError as error:
            result.problems.append(str(error))
        finally:
            training.end()
            result.starts = len(training.starts())
    result.seconds = round(time.monotonic() - started, 1)
    if not result.problems:
        shutil.rmtree(directory)
    return result


def _disturb(training: Training, faults: Sequence[str], generator: random.Random, result: Result) -> None:
    """Start a training, and let faults happen until it ends."""
    training.start()
    steps = sorted(generator.sample(range(2, STEPS - 4), len(faults)))
    for fault, step in zip(faults, steps, strict=True):
        wait(lambda at=step: training.step() >= at or training.ended(), f"step {step}")  # type: ignore[misc]
        time.sleep(generator.uniform(0, 0.1))
        if training.ended():
            return
        starts = len(training.starts())
        newest = training.checkpoints()
        if not _FAULTS[fault](training, generator):
            continue  # the run was faster
        result.faults.append(fault)
        wait(lambda n=starts: len(training.starts()) > n or training.ended(), "restart")  # type: ignore[misc]
        if len(training.starts()) == starts:
            wait(lambda: not training.pids(), "end of all processes", 60)
            if training.process is not None and training.process.returncode == 0:
                return  # it was at its end
            _make_room(training)
            training.start()
            wait(lambda n=starts: len(training.starts()) > n or training.ended(), "start of the same command")  # type: ignore[misc]
        start = training.starts()[-1]["step"] or 0
        least = newest[fault == "flip"] if len(newest) > (fault == "flip") else 0
        if start < least:
            raise SoakError(f"after {fault} the run went on from step {start}, and step {least} was saved")


# -- faults: each returns whether it took place


def _kill(pid: int, number: int) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def _kill_rank(training: Training, generator: random.Random) -> bool:
    ranks = training.pids("rank")
    return bool(ranks) and _kill(generator.choice(ranks), signal.SIGKILL)


def _kill_in_set_up(training: Training, generator: random.Random) -> bool:
    """Kill a rank, and one of the next start's ranks while they set up their process groups.

    A rank listens for the others from the moment at which it opens the store of the first group. That it was hit
    before the first step is in the event of its end.
    """
    starts = len(training.starts())
    if not _kill_rank(training, generator):
        return False
    wait(lambda: len(training.starts()) > starts or training.ended(), "restart")
    wait(lambda: any(map(listens, training.pids("rank"))) or training.ended(), "set-up of process groups")
    time.sleep(generator.uniform(0, 0.2))
    ends = len(training.ends())
    if not _kill_rank(training, generator):
        return False
    wait(lambda: len(training.ends()) > ends or training.ended(), "end of the start that was hit")
    return len(training.ends()) > ends and training.ends()[ends]["step"] is None


def listens(pid: int) -> bool:
    """Return whether a process has a TCP socket on which it accepts connections."""
    links = []
    with contextlib.suppress(OSError):  # it has ended
        links = [os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd")]
    inodes = {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:] if Path(table).exists() else []:
            fields = line.split()  # sl local remote state queues timer repeats uid timeout inode
            if fields[3] == _LISTEN and fields[9] in inodes:
                return True
    return False


def _kill_agent(training: Training, _: random.Random) -> bool:
    agents = training.pids("agent")
    return bool(agents) and _kill(agents[-1], signal.SIGKILL)


def _kill_launcher(training: Training, _: random.Random) -> bool:
    assert training.process is not None
    return _kill(training.process.pid, signal.SIGKILL)


def _stop_rank(training: Training, generator: random.Random) -> bool:
    ranks = training.pids("rank")
    return bool(ranks) and _kill(generator.choice(ranks), signal.SIGSTOP)


def _flip_bit(training: Training, generator: random.Random) -> bool:
    """Stop the ranks, so that nothing is saved meanwhile; flip a bit of the newest checkpoint; kill a rank."""
    ranks = training.pids("rank")
    for pid in ranks:
        _kill(pid, signal.SIGSTOP)
    newest = training.checkpoints()
    if not ranks or not newest:
        for pid in ranks:
            _kill(pid, signal.SIGCONT)
        return False
    checkpoint = training.save / f"global_step{newest[0]}"
    files = sorted(path for path in checkpoint.rglob("*.pt") if path.stat().st_size)
    path = generator.choice(files)
    with open(path, "r+b") as file:
        file.seek(generator.randrange(path.stat().st_size))
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1 << generator.randrange(8)]))
    killed = _kill(ranks[0], signal.SIGKILL)
    for pid in ranks[1:]:
        _kill(pid, signal.SIGCONT)
    return killed


def _kill_on_slow_disk(training: Training, generator: random.Random) -> bool:
    """Kill a rank while each fsync takes longer, so that most of the time something is being saved."""
    starts = len(training.starts())
    training.slow.touch()
    try:
        time.sleep(generator.uniform(0, 3))
        if not _kill_rank(training, generator):
            return False
        wait(lambda: len(training.starts()) > starts or training.ended(), "restart from a slow disk")
        return True
    finally:
        training.slow.unlink()


def _fill_disk(training: Training, _: random.Random) -> bool:
    """Leave too little room for the next checkpoint; False if the checkpoints have no disk of their own."""
    disk_of_save = training.save.parent
    if not os.path.ismount(disk_of_save):
        return False
    with contextlib.suppress(OSError), open(_ballast(training), "wb") as file:  # a save may fill it first
        file.write(bytes(max(0, shutil.disk_usage(disk_of_save).free - 50_000)))
    return True


def _ballast(training: Training) -> Path:
    return training.save.parent / "ballast"


def _make_room(training: Training) -> None:
    _ballast(training).unlink(missing_ok=True)


_FAULTS: dict[str, Callable[[Training, random.Random], bool]] = {
    "rank": _kill_rank,
    "set-up": _kill_in_set_up,
    "agent": _kill_agent,
    "launcher": _kill_launcher,
    "stop": _stop_rank,
    "flip": _flip_bit,
    "full": _fill_disk,
    "slow": _kill_on_slow_disk,
}


@contextmanager
def disk(path: Path) -> Iterator[Path | None]:
    """Yield a directory on a file system of its own; None where none can be mounted."""
    path.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", "size=128m", "tmpfs", str(path)]
    mounted = shutil.which("mount") is not None and subprocess.run(command, capture_output=True).returncode == 0
    try:
        yield path if mounted else None
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(path)], check=True)
        shutil.rmtree(path, ignore_errors=True)


def plan_of_training(number: int, seed: int, scenarios: Sequence[str], faults: int) -> tuple[str, list[str]]:
    """Return the scenario and the faults of a training."""
    generator = random.Random(f"{seed} {number}")
    scenario = scenarios[number % len(scenarios)]
    return scenario, [generator.choice(FAULTS) for _ in range(faults)]


def soak(
    work: Path,
    faults: int,
    seed: int,
    *,
    scenarios: Sequence[str] = tuple(SCENARIOS),
    each: int = FAULTS_OF_TRAINING,
    minutes: float = 1e9,
    results: list[Result] | None = None,
    report: Callable[[list[Result]], None] = lambda _: None,
) -> list[Result]:
    """Let faults happen until there were so many, or the time is over; go on after the given results.

    Args:
        work: Directory for files.
        faults: Number of faults.
        seed: Seed of everything.
        scenarios: Keys in SCENARIOS, which take turns.
        each: Faults of one training.
        minutes: Time after which no training begins.
        results: Results so far.
        report: Function that receives all results after each training.
    """
    results = results or []
    deadline = time.monotonic() + 60 * minutes
    while time.monotonic() < deadline:
        left = faults - sum(len(result.faults) for result in results)
        if left <= 0:
            break
        scenario, chosen = plan_of_training(len(results), seed, scenarios, min(each, left))
        results.append(train_with_faults(work, len(results), scenario, chosen, seed))
        report(results)
    return results


def summary(results: Sequence[Result]) -> dict[str, Any]:
    """Return the numbers of all trainings."""
    kinds = Counter(fault for result in results for fault in result.faults)
    problems = [f"{result.number} {result.scenario}: {problem}" for result in results for problem in result.problems]
    return {
        "trainings": len(results),
        "faults": sum(kinds.values()),
        "kinds": dict(sorted(kinds.items())),
        "scenarios": dict(sorted(Counter(result.scenario for result in results).items())),
        "starts": sum(result.starts for result in results),
        "problems": problems,
        "seconds": round(sum(result.seconds for result in results)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--each", type=int, default=FAULTS_OF_TRAINING, help="faults of one training")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no training after so long")
    parser.add_argument("--scenario", action="append", choices=SCENARIOS, help="only these")
    parser.add_argument("--work", type=Path, help="directory for files (default: a temporary one)")
    parser.add_argument("--out", type=Path, required=True, help="JSON file with the results, with which it goes on")
    arguments = parser.parse_args()
    results = []
    if arguments.out.exists():
        results = [Result(**fields) for fields in json.loads(arguments.out.read_text())["results"]]

    def report(found: list[Result]) -> None:
        last = found[-1]
        print(f"{last.number} {last.scenario}: {' '.join(last.faults)}; {last.problems or 'fine'}", flush=True)
        numbers = {"seed": arguments.seed, "date": time.strftime("%Y-%m-%d"), "summary": summary(found)}
        text = json.dumps({**numbers, "results": [asdict(each) for each in found]}, indent=1)
        arguments.out.write_text(text + "\n")

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # after the running training is ended
    scenarios = tuple(arguments.scenario or SCENARIOS)
    with tempfile.TemporaryDirectory() as temporary:
        work = arguments.work or Path(temporary)
        results = soak(
            work,
            arguments.faults,
            arguments.seed,
            scenarios=scenarios,
            each=arguments.each,
            minutes=arguments.minutes,
            results=results,
            report=report,
        )
    print(json.dumps(summary(results), indent=1))
    return int(any(result.problems for result in results))


if __name__ == "__main__":
    sys.exit(main())
