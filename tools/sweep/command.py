"""Command of sweeps: plan all runs, train those that are left, compare them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from neox.arguments import ScriptParser
from neox.errors import ConfigError, DataError, os_errors
from neox.launch.environment import child_environment
from neox.launch.status.run_status import duration
from neox.log import setup_logging
from neox.resume import lock_output
from tools.sweep.places import Place, find_places
from tools.sweep.planned_run import PlannedRun, State, plan_runs, shown_command
from tools.sweep.results import (
    PICTURE,
    TABLE,
    RunResult,
    format_table,
    read_results,
    values_at_an_end,
    write_results,
)
from tools.sweep.runner import SweepRunner
from tools.sweep.sweep_file import Sweep, read_sweep

_DESCRIPTION = """Train one configuration with several values of its keys, and compare the runs.

python tools/sweep.py lr.yml --dry-run       # the runs, with their tokens and planned times
python tools/sweep.py lr.yml                 # one after another; the same command resumes, and skips what is done
python tools/sweep.py lr.yml -H hostfile     # one run on each host at a time
python tools/sweep.py lr.yml --report        # table and picture of what is there, while it runs, too

lr.yml, whose runs go to runs/lr/NAME:

    configs: [configs/quickstart.yml]
    set: {train_iters: 60}                                     # for all runs
    grid: {optimizer.params.lr: [1.0e-3, 2.0e-3], seed: [1, 2]}

Instead of `grid`, `list` holds a mapping for each run, and `random` draws: {runs: 8, seed: 1, values:
{optimizer.params.lr: {log_uniform: [1.0e-4, 1.0e-2]}, num_layers: [4, 6, 8]}}. docs/sweeps.md has every key."""


def main() -> int:
    """Run the command with this process's command line; return the exit status."""
    setup_logging()
    parser = ScriptParser(description=_DESCRIPTION)
    parser.add_argument("sweep", type=Path, help="sweep file (YAML)")
    parser.add_argument("-H", "--hostfile", help="hosts that each train one run at a time")
    parser.add_argument("--dry-run", action="store_true", help="show the runs and their plans, and start nothing")
    parser.add_argument(
        "--report", action="store_true", help="write table and picture of what is there, and start nothing"
    )
    parser.add_argument("--redo", action="append", default=[], metavar="NAME", help="train this run again (repeatable)")
    args = parser.parse_args()
    sweep = read_sweep(args.sweep)
    places = find_places(args.hostfile, sweep.slots_per_run)
    return sweep_over(sweep, places, dry_run=args.dry_run, report=args.report, redo=args.redo)


def sweep_over(
    sweep: Sweep,
    places: Sequence[Place],
    *,
    dry_run: bool = False,
    report: bool = False,
    redo: Sequence[str] = (),
    shows_table: bool = True,
) -> int:
    """Plan the runs of a sweep, train those that are left, and write table and picture.

    Args:
        sweep: The sweep.
        places: Where runs are trained.
        dry_run: Whether to show the plans only.
        report: Whether to write table and picture only.
        redo: Names of runs that are trained again.
        shows_table: Whether to show the table of runs that have all ended; one of others is always shown.

    Returns:
        0 if every run is done or has diverged; 1 if one has failed; 128 + N if signal N ended the sweep.

    Raises:
        ConfigError: A configuration is wrong, or the settings of a trained run have changed.
        DataError: Another process works on the same sweep.
    """
    runs = plan_runs(sweep, places[0])
    names = [run.name for run in runs]
    unknown = {*redo} - {*names}
    if unknown:
        raise ConfigError(f"--redo {', '.join(sorted(unknown))}: no run has this name; they are {', '.join(names)}")
    if dry_run:
        print(format_plans(runs, places))
        return 0
    if report:
        with os_errors(DataError, f"{sweep.directory} cannot be written"):
            write_results(sweep, runs, results := read_results(sweep, runs, {}, {}))
        _print_results(sweep, results)
        return 0
    _check_runs(sweep, runs, redo)
    with os_errors(DataError, f"{sweep.directory} cannot be written"):
        sweep.directory.mkdir(parents=True, exist_ok=True)
        with lock_output(str(sweep.directory / "sweep")):
            return _train(sweep, runs, places, redo, shows_table=shows_table)


def _check_runs(sweep: Sweep, runs: Sequence[PlannedRun], redo: Sequence[str]) -> None:
    """Raise ConfigError if a run cannot be started, or was trained with other settings."""
    problems = []
    for run in runs:
        name = run.name
        for problem in run.problems:
            problems.append(f"{name}: {problem}")
        changes = run.changes()
        if changes and name not in redo:
            found = f"{run.directory} was trained with other settings: {'; '.join(changes)}"
            ways_out = f"Give another `directory`, set them back, or train it again (--redo {name})"
            if not sweep.compares:  # a ladder chooses most settings of its runs itself
                found += " (by other files of the target, another prediction, or an earlier version)"
                ways_out = f"Give another `directory`, or train it again (--redo {name})"
            problems.append(f"{found}. {ways_out}")
    if problems:
        raise ConfigError(problems)


def _train(
    sweep: Sweep, runs: Sequence[PlannedRun], places: Sequence[Place], redo: Sequence[str], *, shows_table: bool
) -> int:
    """Train the runs that are left."""
    done = (State.DONE, State.DIVERGED)
    left = []
    warnings: dict[str, None] = {}
    for run in runs:
        if run.name in redo or run.state() not in done:
            left.append(run)
            warnings |= dict.fromkeys(run.warnings)
    for warning in warnings:  # each once
        print(f"note: {warning}", file=sys.stderr)
    print(f"{sweep.name}: {len(runs)} runs, {len(runs) - len(left)} of them done already, in {sweep.directory}")

    def report(runner: SweepRunner) -> None:
        write_results(sweep, runs, read_results(sweep, runs, runner.causes, runner.hosts))

    runner = SweepRunner(left, places, redo=redo, environment=child_environment(), say=_say, after_run=report)
    stopped_by = runner.train()
    results = read_results(sweep, runs, runner.causes, runner.hosts)
    write_results(sweep, runs, results)
    status = int(any(result.state not in done for result in results))
    if shows_table or status:
        _print_results(sweep, results)
    if stopped_by is not None:
        print("interrupted; run the same command again to go on", file=sys.stderr)
        return 128 + stopped_by
    return status


def _say(line: str) -> None:
    print(line, flush=True)


def _print_results(sweep: Sweep, results: Sequence[RunResult]) -> None:
    print(format_table(sweep, results))
    best = results[0]
    if sweep.compares and best.score is not None and best.state is State.DONE:
        best_of = "best" if all(result.state.has_ended for result in results) else "best of those that are done"
        print("\n".join([f"{best_of}: {best.name}", *values_at_an_end(results)]))
    if sweep.has_table:
        print(f"{sweep.directory / TABLE}  {sweep.directory / PICTURE}")


def format_plans(runs: Sequence[PlannedRun], places: Sequence[Place]) -> str:
    """Return a line for each run, and the planned time of all on the places."""
    lines = []
    seconds: list[float] = []
    for run in runs:
        parts = [f"{run.name}: {run.parameters:,} parameters in all, {run.steps:,} steps"]
        if run.totals.tokens is not None:
            parts.append(f"{run.totals.tokens:,} tokens")
        if run.seconds is not None:
            parts.append(f"planned {duration(run.seconds)}")
            seconds.append(run.seconds)
        parts.append(run.state().value)
        lines.append(", ".join(parts))
        lines.append(f"  {shown_command(run.command)}")
        for problem in run.problems:
            lines.append(f"  problem: {problem}")
    count = sum(not place.spare for place in places)
    unplanned: PlannedRun | None = None
    for run in runs:
        if run.seconds is None:
            unplanned = run
    if unplanned is not None:
        lines.append(f"{len(runs)} runs; their time is not planned: {unplanned_because(unplanned)}")
    else:
        lines.append(f"{len(runs)} runs, planned {duration(sum(seconds) / count)} on {count} place(s) at a time")
    return "\n".join(lines)


def unplanned_because(run: PlannedRun) -> str:
    """Return why the time of a run is not planned, and what to do."""
    if run.totals.tokens is None:
        return "the number of its steps is not known yet"
    return (
        "the speed of its devices is not known; give `peak_theoretical_tflops` (of one rank) and `expected_mfu` (the "
        "share of it that training reaches)"
    )
