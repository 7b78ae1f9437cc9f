"""Useful time of a training with one kill a minute, and what the rest of the time is spent on.

    benchmarks/useful_time.py [--minutes 15] [--every 60] [--save-every 50] [--side SIDE ...] [--rounds 1]
        [--out FILE.json]

Two CPU ranks train a small network, and save often, in the background. Every minute one of them is killed (SIGKILL), in
turn, because a rank that fails again within a minute of its start waits on purpose. Several sides take turns, each for
so many minutes: `deepy` (`deepy.py train.py --max-restarts`, the default), `again` (without restarts; the command is
typed again as soon as it has ended), and `torchrun` (`torchrun --max-restarts train.py`). The time from the end of the
first step to the end of the last one is divided into

- noticing: from the kill to the event of the end of the ranks, or to the end of the command; for torchrun, which
  reports neither, half a second;
- restarting: from there to the next step, without loading;
- loading: from the line about the checkpoint to the line about the first iteration;
- repeated: steps that had been done, and are done again from the checkpoint on;
- useful: the rest, with the time in which training waits for saves.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.restart_time import SIDES, Measured
from benchmarks.soak_training import SoakError, wait

_LOADING = "loading checkpoint"
_TRAINING = "training from iteration"
_LOOK_SECONDS = 0.005
_SETTLED_SECONDS = 0.5  # after a kill; steps that were under way are in the metrics by then


@dataclass
class Kill:
    """A kill of a rank.

    Attributes:
        time: When.
        step: Last step before.
    """

    time: float
    step: int


class Watched(Measured):
    """A training of which the times of steps and of lines of its output are noted as they appear."""

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
        self.steps: list[tuple[float, int]] = []  # time at which each was seen, and its number
        self.lines: list[tuple[float, str]] = []
        self._places = {"metrics": 0, "log": 0}

    def look(self) -> None:
        """Note what is new."""
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
            file.seek(self._places[name])
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._places[name] += len(whole)
        return whole.decode(errors="replace").splitlines()

    def pass_over(self, kill: Kill) -> float | None:
        """Wait until no rank trains after a kill, type the command again if that is the side, and return the time.

        None for the side whose events hold the time.
        """
        if self.side == "deepy":
            return None
        if self.side == "torchrun":
            self.follow(kill.time + _SETTLED_SECONDS)
            return kill.time + _SETTLED_SECONDS
        wait(lambda: self.look() or self.ended(), "end of the run")
        ended = time.time()
        self.start()
        return ended

    def follow(self, until: float) -> None:
        """Note what happens until a time."""
        while time.time() < until and not self.ended():
            self.look()
            time.sleep(_LOOK_SECONDS)


def train(directory: Path, side: str, minutes: float, every: float, save_every: int) -> dict[str, Any]:
    """Train for so many minutes with a kill every so many seconds, and return the parts of the time."""
    training = Watched(directory, side, save_every)
    training.start()
    kills: list[Kill] = []
    ends: list[float] = []
    try:
        wait(lambda: training.look() or training.steps or training.ended(), "first step")
        if not training.steps:
            raise SoakError(f"the run ended: see {training.directory / 'log'}")
        started = training.steps[0][0]
        end = started + 60 * minutes
        while time.time() < end and not training.ended():
            training.follow(min(end, started + every * (len(kills) + 1)))
            if time.time() >= end - every / 2:
                training.follow(end)
                break
            pid = training.rank_to_kill(len(kills) % training.ranks)
            kill = Kill(time.time(), training.steps[-1][1])
            os.kill(pid, signal.SIGKILL)
            kills.append(kill)
            noticed = training.pass_over(kill)
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
        steps: Time at which each step was seen, and its number.
        lines: Time and text of each line of the output.
        ends: Time after each kill from which on no rank trains.
        kills: The kills.
    """
    found = dict.fromkeys(("noticing", "restarting", "loading", "repeated"), 0.0)
    for kill, end in zip(kills, ends, strict=True):
        after = [(at, step) for at, step in steps if at > end]
        done = max(step for at, step in steps if at <= end)
        first = after[0][0]
        load = _between(lines, end, first)
        found["noticing"] += end - kill.time
        found["loading"] += load
        found["restarting"] += first - end - load
        again = [at for at, step in after if step <= done and at < _next_end(ends, end)]
        if again:  # the first one of them ends the restart
            found["repeated"] += again[-1] - first
    seconds = steps[-1][0] - steps[0][0]
    found["useful"] = seconds - sum(found.values())
    return {
        "seconds": round(seconds, 1),
        "kills": len(kills),
        "steps": max(step for _, step in steps),
        "steps_with_repeated": len(steps),
        "parts": {name: round(value, 1) for name, value in found.items()},
        "shares": {name: round(value / seconds, 4) for name, value in found.items()},
        "each_kill": {name: round(value / max(1, len(kills)), 2) for name, value in found.items() if name != "useful"},
    }


def _next_end(ends: Sequence[float], after: float) -> float:
    return min((end for end in ends if end > after), default=float("inf"))


def _between(lines: Sequence[tuple[float, str]], start: float, end: float) -> float:
    """Return the seconds that loading took between two times; 0 if the ranks started anew."""
    loading = [at for at, line in lines if start < at <= end and _LOADING in line]
    training = [at for at, line in lines if start < at <= end and _TRAINING in line]
    return training[0] - loading[0] if loading and training else 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--every", type=float, default=60, help="seconds between kills")
    parser.add_argument("--save-every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--side", action="append", choices=SIDES, help="sides that take turns (default: deepy)")
    parser.add_argument("--rounds", type=int, default=1, help="turns of each side")
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
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
