"""Soak of runs that heal themselves: random faults in trainings, until they end exactly as undisturbed ones.

    benchmarks/soak.py --faults 300 --out FILE.json [--seed 0] [--each 5] [--work DIRECTORY] [--minutes M]
        [--scenario NAME ...]

Each training is one `deepy.py train.py` of a small network with one or two ranks. Two of the SCENARIOS run on several
hosts (network namespaces with ssh between them). They need root, pdsh and sshd, and are skipped otherwise.
Faults come at random steps: a rank, an agent or the launcher is killed (SIGKILL), a rank is killed while process groups
are set up or while the disk is slow (each fsync takes longer), a rank or an agent is stopped (SIGSTOP), a bit of the
newest checkpoint is flipped and then a rank killed, the disk is filled, a host is cut off. After a fault that the
launcher does not survive, or that ends the run, the same command is typed again.

Checked after each: the run goes on from a checkpoint at least as new as the newest one before the fault (after a
flipped bit: the one before it). At the end: no process is left, and the loss of every step is that of the undisturbed
run, bit for bit; within 2e-6 if the number of ranks has changed.

The seed and the number of a training determine everything except the moment inside a step. Results are written
after each training; the same command with the same --out goes on.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.soak_faults import FUNCTIONS, HOST_FAULTS, LOCAL_FAULTS, make_room
from benchmarks.soak_hosts import training_of
from benchmarks.soak_training import (
    HOST_SCENARIOS,
    LOCAL_SCENARIOS,
    SCENARIOS,
    STEPS,
    SoakError,
    Training,
    disk,
    wait,
)
from tests.end_to_end.network_namespaces import why_not

FAULTS_OF_TRAINING = 5
TOLERANCE = 2e-6  # of a loss, after a change of the number of ranks
SOON_SECONDS = 5  # for the same; sshd's processes end after the connections
END_SECONDS = 60  # until no process is left; a host that is cut off notices it after 30 s


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
    shutil.rmtree(directory, ignore_errors=True)  # of a soak that was interrupted
    with disk(work / f"disk-{number}") as mounted, training_of(directory, scenario, mounted) as training:
        try:
            expected = undisturbed(work, scenario)
            _disturb(training, faults, generator, result)
            wait(training.ended, "end of the run")
            _check_end(training, expected, may_end_later="cut" in result.faults)
        except SoakError as error:
            result.problems.append(str(error))
        result.starts = len(training.starts())
    result.seconds = round(time.monotonic() - started, 1)
    if not result.problems:
        shutil.rmtree(directory)
    return result


def _check_end(training: Training, expected: Mapping[int, float], *, may_end_later: bool) -> None:
    """Check what an ended run has left.

    Args:
        training: The run.
        expected: Losses of the undisturbed run.
        may_end_later: Whether a host was cut off, whose processes end when they notice it.

    Raises:
        SoakError: It is not what it should be.
    """
    if training.process is not None and training.process.returncode:
        raise SoakError(f"the run ended with status {training.process.returncode}")
    deadline = time.monotonic() + (END_SECONDS if may_end_later else SOON_SECONDS)
    while left := training.pids():
        if time.monotonic() > deadline:
            raise SoakError(f"processes are left: {left}")
        time.sleep(0.1)
    losses = training.losses()
    same_layout = len({start["ranks"] for start in training.starts()}) == 1
    tolerance = 0.0 if same_layout else TOLERANCE
    if losses.keys() != expected.keys():
        raise SoakError(f"{len(losses)} steps were trained, and {len(expected)} by the undisturbed run")
    for step, loss in losses.items():
        if not math.isclose(loss, expected[step], rel_tol=0, abs_tol=tolerance):
            raise SoakError(f"the loss of step {step} is {loss}, and {expected[step]} in the undisturbed run")


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
        if not FUNCTIONS[fault](training, generator):
            continue  # the run was faster
        result.faults.append(fault)
        wait(lambda n=starts: len(training.starts()) > n or training.ended(), "restart")  # type: ignore[misc]
        if len(training.starts()) == starts:
            wait(lambda: not training.pids(), "end of all processes", END_SECONDS)
            if training.process is not None and training.process.returncode == 0:
                return  # it was at its end
            make_room(training)
            training.start()
            wait(lambda n=starts: len(training.starts()) > n or training.ended(), "start of the same command")  # type: ignore[misc]
        start = training.starts()[-1]["step"] or 0
        least = newest[fault == "flip"] if len(newest) > (fault == "flip") else 0
        if start < least:
            raise SoakError(f"after {fault} the run went on from step {start}, and step {least} was saved")


def plan_of_training(number: int, seed: int, scenarios: Sequence[str], faults: int) -> tuple[str, list[str]]:
    """Return the scenario and the faults of a training."""
    generator = random.Random(f"{seed} {number}")
    scenario = scenarios[number % len(scenarios)]
    kinds = HOST_FAULTS if scenario in HOST_SCENARIOS else LOCAL_FAULTS
    return scenario, [generator.choice(kinds) for _ in range(faults)]


def possible_scenarios() -> tuple[str, ...]:
    """Return the keys in SCENARIOS that this machine can run."""
    return tuple(LOCAL_SCENARIOS if why_not() else SCENARIOS)


def soak(
    work: Path,
    faults: int,
    seed: int,
    *,
    scenarios: Sequence[str],
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
        if results[-1].problems and not results[-1].faults:
            break  # trainings do not even start
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
    scenarios = tuple(arguments.scenario or possible_scenarios())
    if impossible := set(scenarios).difference(possible_scenarios()):
        print(f"error: {', '.join(sorted(impossible))}: {why_not()}", file=sys.stderr)
        return 2
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
