"""Random configurations, each trained on one rank and in a layout, with a resume in another one: numbers must agree.

    python -m benchmarks.fuzz [--minutes 60] [--seed 1] [--report fuzz.jsonl]   draws and compares; a report continues
    python -m benchmarks.fuzz --case '{"model": [...], ...}'                    one case of a report
    python -m benchmarks.fuzz --shrink --report fuzz.jsonl                      the smallest case of each find, as YAML
    python -m benchmarks.fuzz --coverage --report fuzz.jsonl                    which settings and pairs were compared

The cases of a seed are always the same. On CPU ranks, in fp32 and without dropout.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from itertools import combinations, count
from pathlib import Path

from neox.config.neox_config import yaml_text
from tests.fuzzing.cases import Case, PlanError, draw, is_accepted, named
from tests.fuzzing.settings import LAYOUTS, MODELS, TRAINING
from tests.fuzzing.trials import Outcome, report_line, try_cases, write_data

AT_ONCE = 6
"""Cases in one set of rank processes."""
SECONDS = 120.0
"""Limit of one training of a case; after it, its ranks hang."""
GOOD = ("agrees", "idle")


def drawn(seed: int) -> Iterator[tuple[int, Case]]:
    """Yield the cases of a seed with their numbers, without end."""
    for number in count():
        try:
            yield number, draw(random.Random(f"{seed} {number}"))
        except PlanError as error:
            traceback.print_exception(error)


def shrunk(case: Case, outcome: Outcome, directory: Path, prefixes: dict[str, str]) -> Case:
    """Return the smallest case that still fails in the same way: settings are left out one by one."""
    smaller = True
    while smaller:
        smaller = False
        for setting in dict.fromkeys((*case.resumed, *case.layout, *case.model)):
            candidate = case.without(setting)
            if not is_accepted(candidate):
                continue
            (found,) = try_cases([candidate], directory, prefixes, SECONDS)
            if found.kind == outcome.kind:
                case, smaller = candidate, True
                print(f"  still {found.kind} without {setting.name}", flush=True)
                break
    return case


def coverage(lines: list[dict]) -> str:
    """Return how often settings were compared, and how many pairs were."""
    compared = [line for line in lines if line["kind"] == "agrees"]
    single = Counter(name for line in compared for name in set(line["names"]))
    pairs = {
        pair
        for line in compared
        for pair in combinations(sorted({n.removeprefix("resumed ") for n in line["names"]}), 2)
    }
    names = [setting.name for setting in (*MODELS, *TRAINING, *LAYOUTS)]
    rows = [f"{single[name] + single[f'resumed {name}']:6d}  {name}" for name in names]
    total = len(names) * (len(names) - 1) // 2
    return "\n".join([*rows, f"{len(compared)} cases agree; {len(pairs)} of {total} pairs of settings"])


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--report", type=Path, default=Path("fuzz.jsonl"))
    parser.add_argument("--case", help="JSON of one case")
    parser.add_argument("--shrink", action="store_true", help="shrink the finds of the report")
    parser.add_argument("--coverage", action="store_true", help="print what the report covers")
    arguments = parser.parse_args()
    lines = (
        [json.loads(line) for line in arguments.report.read_text().splitlines()] if arguments.report.exists() else []
    )
    if arguments.coverage:
        print(coverage(lines))
        return 0
    with tempfile.TemporaryDirectory(prefix="fuzz-") as temporary:
        directory = Path(temporary)
        prefixes = write_data(directory)
        if arguments.case or arguments.shrink:
            finds = (
                [named(arguments.case)]
                if arguments.case
                else [named(json.dumps(line["case"])) for line in lines if line["kind"] not in GOOD]
            )
            for case in finds:
                (outcome,) = try_cases([case], directory / "work", prefixes, SECONDS)
                print(f"{outcome.kind}: {outcome.detail}\n{case.to_json()}", flush=True)
                if outcome.kind in GOOD or not arguments.shrink:
                    continue
                smallest = shrunk(case, outcome, directory / "work", prefixes)
                print(f"{smallest.to_json()}\n{yaml_text(smallest.layout_keys())}", flush=True)
            return 0
        return fuzz(arguments, lines, directory, prefixes)


def fuzz(arguments: argparse.Namespace, lines: list[dict], directory: Path, prefixes: dict[str, str]) -> int:
    """Draw and compare cases until the time is over; return 1 if any find was made."""
    done = {line["number"] for line in lines if line["seed"] == arguments.seed}
    start = time.monotonic()
    counts: Counter[str] = Counter()
    waiting: dict[tuple[int, int], list[tuple[int, Case]]] = {}
    for number, case in drawn(arguments.seed):
        if time.monotonic() - start > 60 * arguments.minutes:
            break
        if number in done:
            continue
        group = waiting.setdefault((case.world, case.resumed_world), [])
        group.append((number, case))
        if len(group) < AT_ONCE:
            continue
        del waiting[case.world, case.resumed_world]
        outcomes = try_cases([one for _, one in group], directory / "work", prefixes, SECONDS)
        with arguments.report.open("a") as report:
            for (of_case, one), outcome in zip(group, outcomes, strict=True):
                counts[outcome.kind] += 1
                report.write(report_line(one, outcome, arguments.seed, of_case) + "\n")
                if outcome.kind not in GOOD:
                    print(
                        f"{outcome.kind}: case {of_case}: {', '.join(one.names)}\n  {outcome.detail[-600:]}", flush=True
                    )
        minutes = (time.monotonic() - start) / 60
        print(f"# {minutes:.1f} min: {dict(counts)}, {counts.total() / minutes * 60:.0f} cases an hour", flush=True)
    finds = sum(counts[kind] for kind in counts if kind not in GOOD)
    print(f"{counts.total()} cases, {finds} finds; report: {arguments.report}")
    return 1 if finds else 0


if __name__ == "__main__":
    sys.exit(main())
