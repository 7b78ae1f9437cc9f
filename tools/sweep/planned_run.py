"""Runs of a sweep with their plans."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neox.config import NeoXConfig
from neox.errors import ConfigError, LaunchError, NeoXError
from neox.files import write_text
from neox.launch.hosts.placement import Placement, choose_hosts
from neox.plan import Device, RunPlan
from neox.plan.report.run_totals import RunTotals, run_totals
from neox.plan.run_identity import learning_changes
from neox.plan.run_start import requested_start
from neox.preflight.command_line import parse_arguments
from neox.preflight.job_command import JobCommand
from neox.preflight.planning import read_config
from neox.preflight.resume_notes import evaluates
from neox.shipped_files import scripts_root
from tools.sweep.places import OTHER_HOST_KEYS, Place
from tools.sweep.run_files import RunFiles
from tools.sweep.sweep_file import Sweep, SweepRun, override, with_sources

CHECKPOINTS = "checkpoints"
"""Directory of the checkpoints in the directory of a run."""
_SETTINGS_FILE = "sweep_run.json"
_SECONDS_PER_DAY = 86_400


@dataclass(frozen=True, kw_only=True)
class PlannedRun(RunFiles):
    """A run with its plan.

    Attributes:
        config: Its configuration.
        command: The command that trains it, without the flags of a place.
        plan: Its plan.
        totals: Its tokens, compute and time.
        problems: What is missing for it or does not fit.
        warnings: Further lines of its plan to show.
        device: What each of its ranks runs on.
        too_large: Those of the problems or warnings that say that it needs more memory than its device has.
    """

    config: NeoXConfig
    command: tuple[str, ...]
    plan: RunPlan
    totals: RunTotals
    device: Device
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    too_large: tuple[str, ...] = ()

    @property
    def parameters(self) -> int:
        """Number of its parameters."""
        return self.plan.layers.numel

    def record_settings(self) -> None:
        """Write the settings of the run into its directory, for later calls. Raises OSError."""
        flat = self.config.to_flat()
        write_text(
            self.directory / _SETTINGS_FILE, json.dumps({"values": dict(self.run.values), "config": flat}) + "\n"
        )

    def changes(self) -> tuple[str, ...]:
        """Return the settings that have changed since the run was trained, with both values; none if it was not."""
        try:
            flat = json.loads((self.directory / _SETTINGS_FILE).read_text(encoding="utf-8"))["config"]
            earlier = NeoXConfig.from_flat(flat)
        except (OSError, ValueError, KeyError, ConfigError):
            return ()
        return tuple(learning_changes(earlier, self.config))


def plan_runs(sweep: Sweep, place: Place) -> list[PlannedRun]:
    """Plan every run of a sweep.

    Args:
        sweep: The sweep.
        place: Place for which runs are planned.

    Raises:
        ConfigError: The configuration of a run is wrong, two runs have the same one (values count, not how they are
            written), or a sweep sets what a place decides; with every problem.
        LaunchError: The hosts of the configuration cannot be found.
    """
    given: dict[str, Any] = {}
    for run in sweep.runs:
        given |= {key: value for key, value in {**sweep.settings, **run.values}.items() if value is not None}
    refused = [key for key in OTHER_HOST_KEYS if key in given]
    if refused and place.host is not None:
        raise ConfigError(
            f"{', '.join(refused)}: a place of the hostfile decides the ranks of a run; see slots_per_run"
        )
    planned = []
    problems: list[str] = []
    runs_with: dict[str, list[str]] = {}  # what is wrong, and the runs of which it is
    equal_runs: list[tuple[Any, list[str]]] = []  # values of all keys of a configuration, and the runs that have them
    for run in sweep.runs:
        try:
            config = config_of(sweep, run, place)
            values = config.model_dump()
            for others, names in equal_runs:
                if others == values:
                    names.append(run.name)
                    break
            else:
                equal_runs.append((values, [run.name]))
            planned.append(_plan_run(sweep, run, place, config))
        except LaunchError:
            raise
        except ConfigError as error:
            for problem in with_sources(error.problems, sweep.sources):
                runs_with.setdefault(str(problem), []).append(run.name)
        except NeoXError as error:
            runs_with.setdefault(str(error), []).append(run.name)
    for text, names in runs_with.items():
        problems.append(text if len(names) == len(sweep.runs) else f"{', '.join(names)}: {text}")
    for _, names in equal_runs:
        if len(names) > 1:
            problems.append(
                f"{', '.join(names[:-1])} and {names[-1]} make the same configuration: leave out all but one of them; "
                "to repeat a run, give them different `seed`s"
            )
    if problems:
        raise ConfigError(problems)
    return planned


def _words(sweep: Sweep, run: SweepRun) -> list[str]:
    """Return the command line of a run as the file describes it, without what is its own: directories and names."""
    words = ["train.py", *sweep.configs]
    if sweep.conf_dir is not None:
        words += ["-d", sweep.conf_dir]
    for key, value in {**sweep.settings, **run.values}.items():
        words += ["--set", override(key, value)]
    return words


def _plan_run(sweep: Sweep, run: SweepRun, place: Place, config: NeoXConfig) -> PlannedRun:
    """Plan one run as `deepy.py train.py ... --dry-run` does.

    Args:
        sweep: The sweep.
        run: The run.
        place: Place for which it is planned.
        config: The configuration that the sweep file describes, without what is the run's own.
    """
    directory = sweep.directory.absolute() / run.name
    words = _words(sweep, run)
    for text in _own_settings(config, sweep, run, directory, {**sweep.settings, **run.values}):
        words += ["--set", text]
    arguments = parse_arguments([*words, *place.flags, "--dry-run"])
    config = read_config(arguments)
    if not config.training.train_iters and not config.given("num_train_epochs"):
        raise ConfigError("`train_iters` is missing")
    job, planned, _ = JobCommand(arguments, config).plan_without_run()
    plan = planned.plan
    problems: list[str] = []
    warnings = list(plan.notes)
    for problem in planned.problems:
        if problem in planned.too_large and (planned.device.assumed or job.placement.assumed):
            warnings.append(str(problem))
        else:
            problems.append(str(problem))
    totals = run_totals(plan, planned.device)
    operations: float | None = None
    if totals.tokens is not None:
        operations = float(totals.tokens * totals.flops_per_token)
    planned_seconds: float | None = None
    if totals.days is not None:
        planned_seconds = totals.days * _SECONDS_PER_DAY
    return PlannedRun(
        run=run,
        directory=directory,
        steps=plan.config.training.train_iters or 0,
        is_evaluated=evaluates(config),
        operations=operations,
        planned_seconds=planned_seconds,
        config=config,
        command=(sys.executable, str(scripts_root() / "deepy.py"), *words),
        plan=plan,
        totals=totals,
        device=planned.device,
        problems=tuple(problems),
        warnings=tuple(warnings),
        too_large=tuple(map(str, planned.too_large)),
    )


def config_of(sweep: Sweep, run: SweepRun, place: Place) -> NeoXConfig:
    """Return the configuration of a run at a place, without what is the run's own. Raises ConfigError."""
    return read_config(parse_arguments([*_words(sweep, run), *place.flags, "--dry-run"]))


def placement_of(sweep: Sweep, run: SweepRun, place: Place) -> Placement:
    """Return the hosts and slots that a run has at a place. Raises ConfigError and LaunchError."""
    arguments = parse_arguments([*_words(sweep, run), *place.flags, "--dry-run"])
    return choose_hosts(read_config(arguments), arguments)[0]


def _own_settings(
    config: NeoXConfig, sweep: Sweep, run: SweepRun, directory: Path, given: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the settings that are a run's own: its directories, and its names in trackers.

    A run that would go on from its own `save` goes on from that of the sweep; other starting points stay.
    """
    save = str(directory / CHECKPOINTS)
    yield override("save", save)
    if requested_start(config).own_directory:
        yield override("load", save)
    yield override("log_dir", str(directory))
    if not config.given("keep_last_n_checkpoints"):
        yield override("keep_last_n_checkpoints", 1)
    trackers = config.logging
    if trackers.tensorboard_dir is not None:
        events = Path(trackers.tensorboard_dir)
        # A relative one would be that of the working directory, which later calls and other hosts need not share.
        own = directory / "tensorboard"
        if events.is_absolute():
            own = events / sweep.name / run.name
        yield override("tensorboard_dir", str(own))
    names = {
        "wandb_run_name": trackers.use_wandb,
        "mlflow_run_name": trackers.use_mlflow,
        "comet_experiment_name": trackers.use_comet,
        "trackio_run_name": trackers.use_trackio,
    }
    for key, is_used in names.items():
        if is_used and key not in given:
            yield override(key, f"{sweep.name}/{run.name}")
    if any(names.values()) and trackers.tracker_group is None:
        yield override("tracker_group", sweep.name)


def shown_command(command: Sequence[str]) -> str:
    """Return a command as one would type it."""
    return shlex.join(["python", *command[1:]])
