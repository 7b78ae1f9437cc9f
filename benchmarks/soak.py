"""Soak test of self-healing runs: trainings with random faults must end exactly like undisturbed ones.

    benchmarks/soak.py --faults 300 --out FILE.json [--seed 0] [--each 5] [--work DIRECTORY] [--minutes M]
        [--scenario NAME ...]

Each training is one `deepy.py train.py` of a small network with one or two ranks. Two of the SCENARIOS run on several
hosts (network namespaces with ssh between them). They need root, pdsh and sshd, and are skipped otherwise.
Faults are injected at random steps: a rank, an agent or the launcher is killed (SIGKILL), a rank is killed while
process groups are set up or while the disk is slow (each fsync takes longer), a rank or an agent is stopped (SIGSTOP),
a bit of the newest checkpoint is flipped and then a rank is killed, the disk is filled, a host is cut off. If a fault
kills the launcher or ends the run, the same command is run again.

After each fault the run must resume from a checkpoint at least as new as the newest one before the fault (after a
flipped bit: the one before it). At the end no process may be left, and the loss of every step must be bit for bit that
of the undisturbed run (within 2e-6 if the number of ranks has changed).

The seed and the number of a training determine everything except the exact time within a step. Results are written
after each training. The same command with the same --out resumes an interrupted soak test.
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

from benchmarks.soak_faults import FUNCTIONS, HOST_FAULTS, LOCAL_FAULTS, free_disk
from benchmarks.soak_hosts import open_training
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

FAULTS_PER_TRAINING = 5
TOLERANCE = 2e-6  # for a loss, if the number of ranks has changed
EXIT_SECONDS = 5  # after the launcher, until no process is left; sshd's processes end after the connections
CUT_OFF_EXIT_SECONDS = 60  # the same after a host was cut off, which it notices after 30 s


@dataclass
class Result:
    """Result of one training.

    Attributes:
        number: Number of the training.
        scenario: Key in SCENARIOS.
        faults: Faults that took place, in order.
        starts: Number of times that the ranks were started.
        problems: Descriptions of what went wrong.
        seconds: Duration.
    """

    number: int
    scenario: str
    faults: list[str] = field(default_factory=list)
    starts: int = 0
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0


def undisturbed(work: Path, scenario: str) -> dict[int, float]:
    """Return the losses of a scenario without faults. It is trained once, and its losses are kept in a file."""
    losses_file = work / f"undisturbed-{scenario}.json"
    if not losses_file.exists():
        training = Training(work / f"undisturbed-{scenario}", scenario)
        training.start()
        try:
            wait(training.ended, "end of the undisturbed run")
        finally:
            training.end()
        losses = training.losses()
        if len(losses) != STEPS:
            raise SoakError(f"the undisturbed run of {scenario} failed: see {training.directory / 'log'}")
        losses_file.write_text(json.dumps(losses))
        shutil.rmtree(training.directory)
    return {int(step): loss for step, loss in json.loads(losses_file.read_text()).items()}


def train_with_faults(work: Path, number: int, scenario: str, faults: Sequence[str], seed: int) -> Result:
    """Train a scenario with faults at random steps.

    Args:
        work: Directory for files.
        number: Number of the training.
        scenario: Key in SCENARIOS.
        faults: Names of the faults, in order.
        seed: Seed of the soak test.
    """
    result = Result(number, scenario)
    started = time.monotonic()
    generator = random.Random(f"{seed} {number} moments")
    directory = work / f"training-{number}"
    shutil.rmtree(directory, ignore_errors=True)  # left by an interrupted soak test
    with disk(work / f"disk-{number}") as mounted, open_training(directory, scenario, mounted) as training:
        try:
            expected = undisturbed(work, scenario)
            _inject_faults(training, faults, generator, result)
            wait(training.ended, "end of the run")
            _check_end(training, expected, was_cut_off="cut" in result.faults)
        except SoakError as error:
            result.problems.append(str(error))
        result.starts = len(training.starts())
    result.seconds = round(time.monotonic() - started, 1)
    if not result.problems:
        shutil.rmtree(directory)
    return result


def _check_end(training: Training, expected: Mapping[int, float], *, was_cut_off: bool) -> None:
    """Check the exit status, the remaining processes and the losses of a run that has ended.

    Args:
        training: The run.
        expected: Losses of the undisturbed run.
        was_cut_off: Whether a host was cut off. Its processes end only when they notice it.

    Raises:
        SoakError: The status is not 0, processes are left, or losses differ.
    """
    if training.process is not None and training.process.returncode:
        raise SoakError(f"the run ended with status {training.process.returncode}")
    seconds = CUT_OFF_EXIT_SECONDS if was_cut_off else EXIT_SECONDS
    deadline = time.monotonic() + seconds
    while left := training.pids():
        if time.monotonic() > deadline:
            raise SoakError(f"processes are left: {left}")
        time.sleep(0.1)
    losses = training.losses()
    same_layout = len({start["ranks"] for start in training.starts()}) == 1
    tolerance = 0.0 if same_layout else TOLERANCE
    if losses.keys() != expected.keys():
        raise SoakError(f"{len(losses)} steps were trained, but {len(expected)} in the undisturbed run")
    for step, loss in losses.items():
        if not math.isclose(loss, expected[step], rel_tol=0, abs_tol=tolerance):
            raise SoakError(f"the loss of step {step} is {loss}, but {expected[step]} in the undisturbed run")


def _inject_faults(training: Training, faults: Sequence[str], generator: random.Random, result: Result) -> None:
    """Start a training, and inject faults until it ends."""
    training.start()
    steps = sorted(generator.sample(range(2, STEPS - 4), len(faults)))
    for fault, step in zip(faults, steps, strict=True):
        training.wait_for_step(step)
        time.sleep(generator.uniform(0, 0.1))
        if training.ended():
            return
        starts = len(training.starts())
        checkpoints = training.checkpoints()
        if not FUNCTIONS[fault](training, generator):
            continue  # it was too late for this fault
        result.faults.append(fault)
        training.wait_for_start(starts, "restart")
        if len(training.starts()) == starts:
            wait(lambda: not training.pids(), "end of all processes", CUT_OFF_EXIT_SECONDS)
            if training.process is not None and training.process.returncode == 0:
                return  # the fault came after the last step
            free_disk(training)
            training.start()
            training.wait_for_start(starts, "start of the same command")
        if fault == "flip":
            checkpoints = checkpoints[1:]  # the newest one is damaged
        resumed_step = training.starts()[-1]["step"] or 0
        newest_step = checkpoints[0] if checkpoints else 0
        if resumed_step < newest_step:
            raise SoakError(f"after {fault} the run resumed from step {resumed_step}, but step {newest_step} was saved")


def draw_training(number: int, seed: int, scenarios: Sequence[str], faults: int) -> tuple[str, list[str]]:
    """Return the scenario and the randomly drawn faults of a training."""
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
    each: int = FAULTS_PER_TRAINING,
    minutes: float = 1e9,
    results: list[Result] | None = None,
    report: Callable[[list[Result]], None] = lambda _: None,
) -> list[Result]:
    """Run trainings until enough faults have taken place, or the time is over. Return the results of all trainings.

    Args:
        work: Directory for files.
        faults: Number of faults to inject, including those in `results`.
        seed: Seed of all random choices.
        scenarios: Keys in SCENARIOS, which take turns.
        each: Number of faults per training.
        minutes: Minutes after which no further training is started.
        results: Results of an interrupted soak test, which this call continues.
        report: Function that receives all results after each training.
    """
    results = results or []
    deadline = time.monotonic() + 60 * minutes
    while time.monotonic() < deadline:
        left = faults - sum(len(result.faults) for result in results)
        if left <= 0:
            break
        scenario, chosen = draw_training(len(results), seed, scenarios, min(each, left))
        results.append(train_with_faults(work, len(results), scenario, chosen, seed))
        report(results)
        if results[-1].problems and not results[-1].faults:
            break  # trainings do not even start
    return results


def summary(results: Sequence[Result]) -> dict[str, Any]:
    """Return totals over all trainings."""
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
    parser.add_argument("--faults", type=int, default=300, help="number of faults to inject (default: 300)")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random choices (default: 0)")
    parser.add_argument("--each", type=int, default=FAULTS_PER_TRAINING, help="number of faults per training")
    parser.add_argument("--minutes", type=float, default=1e9, help="start no further training after so many minutes")
    parser.add_argument("--scenario", action="append", choices=SCENARIOS, help="run only this one; may be repeated")
    parser.add_argument("--work", type=Path, help="directory for files (default: a temporary one)")
    parser.add_argument(
        "--out", type=Path, required=True, help="JSON file for the results; if it exists, resume from it"
    )
    arguments = parser.parse_args()
    results = []
    if arguments.out.exists():
        results = [Result(**fields) for fields in json.loads(arguments.out.read_text())["results"]]

    def report(results: list[Result]) -> None:
        last = results[-1]
        print(f"{last.number} {last.scenario}: {' '.join(last.faults)}; {last.problems or 'passed'}", flush=True)
        document = {
            "seed": arguments.seed,
            "date": time.strftime("%Y-%m-%d"),
            "summary": summary(results),
            "results": [asdict(result) for result in results],
        }
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # as an exception, so clean-up runs
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
