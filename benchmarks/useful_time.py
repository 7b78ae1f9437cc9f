"""Share of useful time in a training with one kill per minute, and a breakdown of the rest.

    benchmarks/useful_time.py [--minutes 15] [--every 60] [--save-every 50] [--side SIDE ...] [--rounds 1]
        [--out FILE.json]

Two CPU ranks train a small network, and save often and in the background. Every minute one of them is killed
(SIGKILL). The ranks take turns, because a rank that fails again within a minute of its start is restarted only after a
pause. Several sides take turns, each for `--minutes`: `deepy` (`deepy.py train.py --max-restarts`, the default),
`again` (without restarts; the command is run again as soon as it has ended), and `torchrun` (`torchrun --max-restarts
train.py`). The time from the end of the first step to the end of the last one is divided into

- noticing: from the kill to the `end` event, or to the end of the command; half a second for torchrun, which has
  neither;
- restarting: from there to the next step, without loading;
- loading: from the line about the checkpoint to the line about the first iteration;
- repeated: steps that are trained again, because they came after the checkpoint;
- useful: the rest, including the time in which the training waits for saves.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.restart_time import SIDES, SideTraining
from benchmarks.soak_training import SoakError, wait

_LOADING = "loading checkpoint"
_TRAINING = "training from iteration"
_POLL_SECONDS = 0.005
_SETTLED_SECONDS = 0.5  # after a kill; steps that were in progress are in the metrics by then


@dataclass
class Kill:
    """A kill of a rank.

    Attributes:
        time: Time of the kill, in seconds since the epoch.
        step: Last step before the kill.
    """

    time: float
    step: int


class RecordedTraining(SideTraining):
    """A training that records when each step and each line of output appears."""

    def __init__(self, directory: Path, side: str, save_every: int) -> None:
        super().__init__(directory, side)
        restarts = 1000 if side == "deepy" else 0
        self.keys |= {
            "checkpoint_factor": save_every,
            "log_interval": 100,
            "async_save": True,
            "max_restarts": restarts,
        }
        (directory / "soak.yml").write_text(json.dumps(self.keys))
        self.steps: list[tuple[float, int]] = []  # time and number of each
        self.lines: list[tuple[float, str]] = []
        self._offsets = {"metrics": 0, "log": 0}  # bytes read so far

    def record(self) -> None:
        """Record the steps and lines that have appeared since the last call."""
        now = time.time()
        for line in self._new_lines("metrics", self.run / "metrics.jsonl"):
            row = json.loads(line)
            if row["kind"] == "step":
                self.steps.append((now, row["iteration"]))
        for line in self._new_lines("log", self.directory / "log"):
            self.lines.append((now, line))

    def _new_lines(self, name: str, path: Path) -> list[str]:
        if not path.exists():
            return []
        with open(path, "rb") as file:
            file.seek(self._offsets[name])
            text = file.read()
        complete_lines = text[: text.rfind(b"\n") + 1]
        self._offsets[name] += len(complete_lines)
        return complete_lines.decode(errors="replace").splitlines()

    def wait_until_noticed(self, kill: Kill) -> float | None:
        """Wait until a kill has been noticed, run the command again if the side needs it, and return the time.

        Returns:
            The time from which no rank trains; None for `deepy`, whose event log has it.
        """
        if self.side == "deepy":
            return None
        if self.side == "torchrun":
            self.record_until(kill.time + _SETTLED_SECONDS)
            return kill.time + _SETTLED_SECONDS
        wait(lambda: self.record() or self.ended(), "end of the run")
        ended = time.time()
        self.start()
        return ended

    def record_until(self, end: float) -> None:
        """Record until a time, or until the run ends."""
        while time.time() < end and not self.ended():
            self.record()
            time.sleep(_POLL_SECONDS)


def train(directory: Path, side: str, minutes: float, every: float, save_every: int) -> dict[str, Any]:
    """Train with periodic kills, and return the parts of the time.

    Args:
        directory: Directory of the training.
        side: A value in SIDES.
        minutes: Duration after the first step.
        every: Seconds between kills.
        save_every: Steps between checkpoints.
    """
    training = RecordedTraining(directory, side, save_every)
    training.start()
    kills: list[Kill] = []
    ends: list[float] = []
    try:
        wait(lambda: training.record() or training.steps or training.ended(), "first step")
        if not training.steps:
            raise SoakError(f"the run ended: see {training.directory / 'log'}")
        started = training.steps[0][0]
        end = started + 60 * minutes
        while time.time() < end and not training.ended():
            training.record_until(min(end, started + every * (len(kills) + 1)))
            if time.time() >= end - every / 2:  # too late for another kill
                training.record_until(end)
                break
            pid = training.rank_to_kill(len(kills) % training.ranks)
            kill = Kill(time.time(), training.steps[-1][1])
            os.kill(pid, signal.SIGKILL)
            kills.append(kill)
            noticed = training.wait_until_noticed(kill)
            if noticed is not None:
                ends.append(noticed)
        if side == "deepy":
            ends = [event["time"] for event in training.ends()]
        return parts(training.steps, training.lines, ends, kills)
    finally:
        training.end()


def parts(
    steps: Sequence[tuple[float, int]],
    lines: Sequence[tuple[float, str]],
    ends: Sequence[float],
    kills: Sequence[Kill],
) -> dict[str, Any]:
    """Return the seconds of each part, and their shares.

    Args:
        steps: Time and number of each step.
        lines: Time and text of each line of output.
        ends: For each kill, the time from which no rank trains.
        kills: The kills.

    Raises:
        SoakError: No step follows the last kill.
    """
    totals = dict.fromkeys(("noticing", "restarting", "loading", "repeated"), 0.0)
    for kill, end in zip(kills, ends, strict=True):
        steps_after = [(at, step) for at, step in steps if at > end]
        if not steps_after:
            raise SoakError("no step was done after the last kill: give more --minutes, or kill less often (--every)")
        last_step = max(step for at, step in steps if at <= end)
        restarted_at = steps_after[0][0]
        loading = _loading_seconds(lines, end, restarted_at)
        totals["noticing"] += end - kill.time
        totals["loading"] += loading
        totals["restarting"] += restarted_at - end - loading
        next_end = min((other for other in ends if other > end), default=math.inf)
        repeated_at = [at for at, step in steps_after if step <= last_step and at < next_end]
        if repeated_at:  # the first repeated step counts as restarting
            totals["repeated"] += repeated_at[-1] - restarted_at
    seconds = steps[-1][0] - steps[0][0]
    totals["useful"] = seconds - sum(totals.values())
    each_kill = {}
    for name, value in totals.items():
        if name != "useful":
            each_kill[name] = round(value / max(1, len(kills)), 2)
    return {
        "seconds": round(seconds, 1),
        "kills": len(kills),
        "steps": max(step for _, step in steps),
        "steps_with_repeated": len(steps),
        "parts": {name: round(value, 1) for name, value in totals.items()},
        "shares": {name: round(value / seconds, 4) for name, value in totals.items()},
        "each_kill": each_kill,
    }


def _loading_seconds(lines: Sequence[tuple[float, str]], start: float, end: float) -> float:
    """Return the seconds that loading took between two times; 0 if the ranks started without a checkpoint."""
    loading = [at for at, line in lines if start < at <= end and _LOADING in line]
    training = [at for at, line in lines if start < at <= end and _TRAINING in line]
    return training[0] - loading[0] if loading and training else 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=15, help="duration of each turn (default: 15)")
    parser.add_argument("--every", type=float, default=60, help="seconds between kills")
    parser.add_argument("--save-every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument(
        "--side", action="append", choices=SIDES, help="a side that takes turns; may be repeated (default: deepy)"
    )
    parser.add_argument("--rounds", type=int, default=1, help="number of turns of each side (default: 1)")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    arguments = parser.parse_args()
    numbers: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "cores": os.cpu_count()}
    numbers["load_before"] = os.getloadavg()
    for _ in range(arguments.rounds):
        for side in arguments.side or ["deepy"]:
            with tempfile.TemporaryDirectory() as directory:
                run = Path(directory) / "run"
                measured = train(run, side, arguments.minutes, arguments.every, arguments.save_every)
            numbers.setdefault(side, []).append(measured)
            print(side, measured["shares"], flush=True)
    numbers["load_after"] = os.getloadavg()
    print(json.dumps(numbers, indent=1))
    if arguments.out:
        arguments.out.write_text(json.dumps(numbers, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
