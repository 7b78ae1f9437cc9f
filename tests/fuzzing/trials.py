"""Trial of a case: three small trainings by `neox.train.pretrain`, whose numbers must agree.

    reference   one rank, all steps
    layout      the case's ranks and layout, all steps, saved in the middle
    resumed     another layout from that checkpoint on, to the end

Losses, gradient norms and evaluations of each step are compared, and the weights at the end.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from neox.metrics import METRICS_FILE, read_metrics
from neox.plan import RunPlan
from tests.distributed.spawn import RankError, join_anew, run_ranks
from tests.fuzzing.cases import Case, plan_of
from tests.fuzzing.settings import SAVED_AT, STEPS

LOSS_TOLERANCE = 2e-5
"""Relative; sums in another order differ by 1e-7 a step, which four steps of Adam enlarge."""
NORM_TOLERANCE = 5e-4
WEIGHT_TOLERANCE = 5e-3
"""Relative to the largest change of a tensor in training."""
_TIMED = ("time", "seconds", "per_second", "tflops", "mfu", "memory", "elapsed", "gib", "bytes")


@dataclass
class Outcome:
    """What became of a case: nothing wrong, or what differs or failed.

    Attributes:
        kind: `agrees`, `differs`, `fails`, `hangs` or `idle` (nothing was trained, so nothing is compared).
        detail: The first difference, or the traceback.
        numbers: How many numbers were compared.
    """

    kind: str
    detail: str = ""
    numbers: int = 0
    worst: float = 0.0


@dataclass(frozen=True)
class Run:
    """One training of a trial."""

    keys: Mapping[str, Any]
    world: int
    directory: Path


def write_data(directory: Path) -> dict[str, str]:
    """Write small token files; return their prefixes by the names that settings use."""
    from neox.data.token_files.builder import IndexedDatasetBuilder

    generator = np.random.default_rng(5)
    prefixes = {name: str(directory / name) for name in ("text", "other", "labels")}
    with (
        IndexedDatasetBuilder(prefixes["text"], np.uint16) as text,
        IndexedDatasetBuilder(prefixes["other"], np.uint16) as other,
        IndexedDatasetBuilder(prefixes["labels"], np.int32) as labels,
    ):
        for _ in range(120):
            length = int(generator.integers(3, 40))
            ids = (int(generator.integers(97, 122)) + np.arange(length) * int(generator.integers(1, 4))) % 26 + 97
            document = np.append(ids, 0)
            text.add_document(document)
            masked = generator.random(length + 1) < 0.3
            labels.add_document(np.where(masked, -100, document).astype(np.int32))
            other.add_document(np.append(generator.integers(65, 91, length), 0))
    return prefixes


def with_paths(value: Any, prefixes: Mapping[str, str]) -> Any:
    """Return a key's value with `{text}` and the like replaced by prefixes of token files."""
    if isinstance(value, str) and value.startswith("{"):
        return prefixes[value.strip("{}")]
    if isinstance(value, (list, tuple)):
        return [with_paths(one, prefixes) for one in value]
    return value


def runs_of(case: Case, directory: Path, prefixes: Mapping[str, str]) -> tuple[Run, Run, Run]:
    """Return the three trainings of a case."""

    def run(keys: dict[str, Any], world: int, name: str, **more: Any) -> Run:
        here = directory / name
        complete = {key: with_paths(value, prefixes) for key, value in keys.items()}
        complete |= {"save": str(here / "save"), "log_dir": str(here / "logs"), **more}
        return Run(complete, world, here)

    reference = run(case.reference_keys(), 1, "reference")
    layout = run(case.layout_keys(), case.world, "layout")
    start = {"load": layout.keys["save"], "iteration": SAVED_AT}
    resumed = run(case.resumed_keys(), case.resumed_world, "resumed", **start)
    return reference, layout, resumed


def train_each(runs: Sequence[Run]) -> list[str]:
    """Train runs one after the other on this rank, all ranks together; return the traceback of each, or nothing.

    After a failure the others are not trained: this process may hold what a collective left behind.
    """
    from neox.train import pretrain

    errors = []
    for number, run in enumerate(runs):
        _print_to(run.directory / "output")
        try:
            pretrain(plan_of(dict(run.keys), run.world))
        except BaseException:
            errors.append(traceback.format_exc())
            return errors
        errors.append("")
        join_anew(str(number))
    return errors


def _print_to(path: Path) -> None:
    """Let this process print to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)


def scalars_of(run: Run) -> dict[tuple[int, str], float]:
    """Return the numbers of a run's metrics that do not measure time or memory."""
    found = {}
    for row in read_metrics(run.directory / "logs" / METRICS_FILE):
        for name, value in row.items():
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if "/" in name and is_number and not any(word in name for word in _TIMED):
                found[int(row["iteration"]), name] = float(value)
    return found


def first_difference(
    expected: Mapping[tuple[int, str], float], got: Mapping[tuple[int, str], float]
) -> tuple[str, float]:
    """Return the first number that differs more than rounding explains, and the largest relative difference."""
    worst = 0.0
    for key in sorted(expected.keys() & got.keys()):
        right, found = expected[key], got[key]
        if math.isnan(right) and math.isnan(found):
            continue
        tolerance = NORM_TOLERANCE if "norm" in key[1] else LOSS_TOLERANCE
        difference = abs(found - right) / max(abs(right), 1e-3)
        if not difference <= tolerance:
            return f"iteration {key[0]}: {key[1]} is {found:.7g}, and {right:.7g} on one rank", difference
        worst = max(worst, difference)
    return "", worst


def weights_of(plan: RunPlan, run: Run, iteration: int = STEPS) -> dict[str, np.ndarray]:
    """Return all weights of a run's checkpoint."""
    from neox.checkpoint import CheckpointReader

    reader = CheckpointReader(run.directory / "save" / f"global_step{iteration}", plan.layers)
    return {f"{index}.{name}": reader.full(index, name).float().numpy() for index, name in reader.items()}


def compare(case: Case, runs: tuple[Run, Run, Run]) -> Outcome:
    """Compare the numbers of a case's trainings."""
    reference, layout, resumed = runs
    expected = scalars_of(reference)
    numbers, worst = 0, 0.0
    for run in (layout, resumed):
        got = scalars_of(run)
        if run is resumed:
            got = {key: value for key, value in got.items() if key[0] > SAVED_AT}
        if not any(name == "train/lm_loss" for _, name in got):
            return Outcome(
                "differs", f"{run.directory.name}: no loss is logged, only {sorted({name for _, name in got})}"
            )
        difference, largest = first_difference(expected, got)
        if difference:
            return Outcome("differs", f"{run.directory.name}: {difference}", numbers, largest)
        numbers += len(expected.keys() & got.keys())
        worst = max(worst, largest)
    plan = plan_of(dict(reference.keys), 1)
    begun, ended = weights_of(plan, reference, SAVED_AT), weights_of(plan, reference)
    changes = {name: float(np.abs(ended[name] - begun[name]).max()) for name in ended}
    if not any(changes.values()):
        return Outcome("idle", "no weight has changed")
    for run in (layout, resumed):
        got_weights = weights_of(plan, run)
        for name, right in ended.items():
            off = float(np.abs(got_weights[name] - right).max())
            limit = WEIGHT_TOLERANCE * changes[name] + 1e-6
            if not off <= limit:
                return Outcome(
                    "differs", f"{run.directory.name}: weights {name} are off by {off:.3g}, at most {limit:.3g}"
                )
            numbers += right.size
    return Outcome("agrees", numbers=numbers, worst=worst)


def try_cases(cases: Sequence[Case], directory: Path, prefixes: Mapping[str, str], timeout: float) -> list[Outcome]:
    """Train cases of the same numbers of ranks, each set of ranks started once, and compare each.

    If one fails, all are tried again one by one, so that a failure is laid to its case.
    """
    shutil.rmtree(directory, ignore_errors=True)
    all_runs = [runs_of(case, directory / str(number), prefixes) for number, case in enumerate(cases)]
    failures: dict[int, str] = {}
    for position in range(3):
        runs = [of_case[position] for of_case in all_runs]
        for number, error in enumerate(_train(runs, timeout * len(runs))):
            if error:
                failures.setdefault(number, f"{runs[number].directory.name}: {error}")
        if failures:
            break
    if failures and len(cases) > 1:
        return [try_cases([case], directory, prefixes, timeout)[0] for case in cases]
    if failures:
        return [Outcome("hangs" if "still running" in failures[0] else "fails", failures[0])]
    return [compare(case, runs) for case, runs in zip(cases, all_runs, strict=True)]


def _train(runs: Sequence[Run], timeout: float) -> list[str]:
    """Train runs of one number of ranks; return the traceback of each, or nothing."""
    try:
        by_rank = run_ranks(runs[0].world, train_each, list(runs), timeout=timeout)
    except RankError as error:
        return [str(error)] * len(runs)
    errors = []
    for number in range(len(runs)):
        told = [of_rank[number] if number < len(of_rank) else "not reached" for of_rank in by_rank]
        errors.append(next((error for error in told if error), ""))
    return errors


def report_line(case: Case, outcome: Outcome, seed: int, number: int) -> str:
    """Return one line of the report."""
    return json.dumps(
        {"seed": seed, "number": number, "case": json.loads(case.to_json()), "names": case.names, **vars(outcome)}
    )
