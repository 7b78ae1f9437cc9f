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
from tools.sweep.planned_run import PlannedRun, plan_runs, shown_command
from tools.sweep.progress import format_progress, read_progress
from tools.sweep.record import Launches, SweepRecord, earlier_record, lock_prefix, write_record
from tools.sweep.results import PICTURE, TABLE, RunResult, best_words, format_table, read_results, write_results
from tools.sweep.run_files import State
from tools.sweep.runner import SweepRunner
from tools.sweep.sweep_file import Sweep, read_sweep

_DESCRIPTION = """Train one configuration with several values of its keys, and compare the runs.

python tools/sweep.py lr.yml --dry-run       # the runs, with their tokens and planned times
python tools/sweep.py lr.yml                 # one after another; the same command resumes, and skips what is done
python tools/sweep.py lr.yml -H hostfile     # one run on each host at a time
python tools/sweep.py lr.yml --report        # table and picture of what is there, while it runs, too
python tools/status.py runs/lr               # how far it is: what trains, what failed, the best, the time left

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
        earlier = earlier_record(sweep)
        if earlier is None:
            record = SweepRecord(sweep, tuple(runs), _at_a_time(places), Launches())
        else:
            record = SweepRecord(sweep, tuple(runs), earlier.places, earlier.launches)
        progress = read_progress(record)
        with os_errors(DataError, f"{sweep.directory} cannot be written"):
            write_results(sweep, runs, progress.results)
        print(format_progress(progress))
        return 0
    _check_runs(sweep, runs, redo)
    with os_errors(DataError, f"{sweep.directory} cannot be written"):
        sweep.directory.mkdir(parents=True, exist_ok=True)
        with lock_output(lock_prefix(sweep)):
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

    earlier = earlier_record(sweep)
    launches = Launches() if earlier is None else earlier.launches
    launches.training.clear()  # those of a process that was killed

    def record() -> None:
        if sweep.has_table:
            write_record(sweep, runs, _at_a_time(places), launches)

    def report() -> None:
        record()
        write_results(sweep, runs, read_results(sweep, runs, launches.causes, launches.hosts))

    record()  # `tools/status.py` shows the sweep from its first run on
    runner = SweepRunner(
        left,
        places,
        redo=redo,
        launches=launches,
        environment=child_environment(),
        say=_say,
        after_start=record,
        after_run=report,
    )
    stopped_by = runner.train()
    record()
    results = read_results(sweep, runs, launches.causes, launches.hosts)
    write_results(sweep, runs, results)
    status = int(any(result.state not in done for result in results))
    if shows_table or status:
        _print_results(sweep, results)
    if stopped_by is not None:
        print("interrupted; run the same command again to go on", file=sys.stderr)
        return 128 + stopped_by
    return status


def _at_a_time(places: Sequence[Place]) -> int:
    """Return the number of runs that are trained at a time."""
    return sum(not place.spare for place in places)


def _say(line: str) -> None:
    print(line, flush=True)


def _print_results(sweep: Sweep, results: Sequence[RunResult]) -> None:
    print(format_table(sweep, results))
    for line in best_words(sweep, results):
        print(line)
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
        if run.planned_seconds is not None:
            parts.append(f"planned {duration(run.planned_seconds)}")
            seconds.append(run.planned_seconds)
        parts.append(run.state().value)
        lines.append(", ".join(parts))
        lines.append(f"  {shown_command(run.command)}")
        for problem in run.problems:
            lines.append(f"  problem: {problem}")
    count = _at_a_time(places)
    unplanned: PlannedRun | None = None
    for run in runs:
        if run.planned_seconds is None:
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
