"""Time from the death of a rank to the next step: `max_restarts`, the same command run again, and torchrun.

    benchmarks/restart_time.py [--rounds 5] [--out FILE.json]

Two CPU ranks train a small network and save every 20 steps. After a few saves, when the warm processes are ready, rank
1 is killed (SIGKILL), and the time until the metrics contain the next step is measured. The three sides take turns:

- `deepy`: `deepy.py train.py --max-restarts 9`. Its time has three parts: noticing, planning, and the start of the
  ranks;
- `again`: the same without restarts; the command is run again as soon as it has ended;
- `torchrun`: `torchrun --max-restarts 1000 train.py --payload ...`, which finds the newest checkpoint as well.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.soak_training import MARK, SoakError, Training, wait
from neox.config import NeoXConfig
from neox.launch.agent.warm_start import WAITING_NAME
from neox.plan import encode_payload, resolve
from neox.run_events import read_events
from neox.tokenizer import build_tokenizer

ROOT = Path(__file__).resolve().parents[1]
STEPS = 100_000
SAVE_EVERY = 20
KILL_AFTER = 50
SIDES = ("deepy", "again", "torchrun")


class SideTraining(Training):
    """A training that is started by the command of one side.

    Args:
        directory: Directory for its configuration, logs and checkpoints.
        side: A value in SIDES.
    """

    def __init__(self, directory: Path, side: str) -> None:
        super().__init__(directory, "dense")
        self.side = side
        keys = json.loads((directory / "soak.yml").read_text())
        restarts = 9 if side == "deepy" else 0
        keys |= {
            "train_iters": STEPS,
            "checkpoint_factor": SAVE_EVERY,
            "eval_interval": STEPS,
            "max_restarts": restarts,
        }
        keys |= {"hang_timeout": 600, "save": str(self.save), "load": str(self.save)}
        (directory / "soak.yml").write_text(json.dumps(keys))
        self.keys = keys

    def start(self) -> None:
        """Start the side's command."""
        if self.side != "torchrun":
            super().start()
            return
        vocabulary = build_tokenizer("HFTokenizer", self.keys["vocab_file"]).vocab_size
        payload = encode_payload(resolve(NeoXConfig.from_flat(self.keys), 2, vocabulary))
        torchrun = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--max-restarts", "1000", "--standalone"]
        command = [sys.executable, *torchrun, str(ROOT / "train.py"), "--payload", payload]
        variables = {
            MARK: self.mark,
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            # else the ranks of a restart find addresses of the previous start, and hang (PyTorch #135712, #167288)
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        with open(self.directory / "log", "ab") as log:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, **variables},
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def rank_to_kill(self, rank: int = 1) -> int:
        """Return the process id of a rank."""
        role = None if self.side == "torchrun" else "rank"
        for pid in self.pids(role):
            if f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                return pid
        raise RuntimeError(f"rank {rank} is not running: see {self.directory / 'log'}")

    def is_warm(self) -> bool:
        """Return whether all warm processes are ready. Only `deepy` has any; for the other sides return True."""
        if self.side != "deepy":
            return True
        names = []
        for pid in self.pids():
            with suppress(OSError):
                names.append(Path(f"/proc/{pid}/comm").read_text().strip())
        return names.count(WAITING_NAME) == self.ranks

    def has_repeated(self, rows: int) -> bool:
        """Return whether the metrics have a repeated step, as after a restart, after their first `rows` lines."""
        previous = 0
        for number, line in enumerate((self.run / "metrics.jsonl").read_text().splitlines()):
            if line.endswith("}") and '"step"' in line:
                iteration = json.loads(line)["iteration"]
                if number >= rows and iteration <= previous:
                    return True
                previous = iteration
        return False

    def rows(self) -> int:
        """Return the number of lines in the metrics."""
        return (self.run / "metrics.jsonl").read_bytes().count(b"\n")


def measure(work: Path, side: str) -> dict[str, float]:
    """Return the seconds from the death of a rank to the next step, and their parts if they are known."""
    training = SideTraining(work, side)
    training.start()
    try:
        wait(lambda: training.step() >= KILL_AFTER or training.ended(), "steps")
        wait(lambda: training.is_warm() or training.ended(), "warm processes")
        # kill between two checkpoints, so that the first step after the restart is a repeated one
        wait(lambda: SAVE_EVERY // 4 <= training.step() % SAVE_EVERY <= SAVE_EVERY // 2, "steps after a checkpoint")
        rows = training.rows()
        killed = time.time()
        os.kill(training.rank_to_kill(), signal.SIGKILL)
        if side == "again":
            wait(training.ended, "end of the run")
            training.start()
        wait(lambda: training.has_repeated(rows) or training.ended(), "next step")
        if not training.has_repeated(rows):
            raise SoakError(f"the run ended: see {training.directory / 'log'}")
        parts = {"all": time.time() - killed}
        if side == "deepy":
            events = read_events(training.run)
            end = next(event["time"] for event in events if event["event"] == "end")
            start = [event["time"] for event in events if event["event"] == "start"][-1]
            parts |= {"noticing": end - killed, "planning": start - end, "ranks": killed + parts["all"] - start}
        return parts
    finally:
        training.end()


def medians(measurements: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the median of each part."""
    return {part: round(median(each[part] for each in measurements), 2) for part in measurements[0]}


def compare(rounds: int, report: Callable[[str], None]) -> dict[str, Any]:
    """Let the sides take turns, and return the medians and all measurements."""
    measurements: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for number in range(rounds):
        for side in SIDES:
            with tempfile.TemporaryDirectory() as directory:
                measurements[side].append(measure(Path(directory) / side, side))
            report(f"{number} {side}: {measurements[side][-1]}")
    return {"medians": {side: medians(each) for side, each in measurements.items()}, "all": measurements}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="number of turns of each side (default: 5)")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    arguments = parser.parse_args()
    load = os.getloadavg()
    numbers = {"date": time.strftime("%Y-%m-%d"), "cores": os.cpu_count(), "load_before": load}
    numbers |= compare(arguments.rounds, lambda line: print(line, flush=True))
    print(json.dumps(numbers["medians"], indent=1))
    if arguments.out:
        arguments.out.write_text(json.dumps(numbers, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
