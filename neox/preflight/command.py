"""The command `deepy.py`: show a plan (`--dry-run`), check hosts (`doctor`), or start a run."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from shlex import join
from typing import Any

from neox import is_own_script
from neox.config import NeoXConfig
from neox.config.sections.runner import RunnerConfig
from neox.errors import ConfigError, LaunchError, UnreachableHostError
from neox.launch.agent_processes import AgentProcesses
from neox.launch.command_line import (
    INFERENCE,
    TOOLS,
    find_lone_tool,
    find_script,
    parse_arguments,
    plain_command,
)
from neox.launch.commands import deepspeed_command, format_commands, host_commands
from neox.launch.doctor import Checks, HostReport, examine, format_reports
from neox.launch.environment import child_environment, forwarded_secrets, launch_environment
from neox.launch.host_groups import host_groups, ranks_of_hosts
from neox.launch.machine import native_formats
from neox.launch.outcome import EndKind, RunEnd
from neox.launch.placement import ChosenBy, Placement, choose_hosts, place_ranks
from neox.launch.run_lock import reserve
from neox.launch.spec import LaunchSpec
from neox.launch.start import (
    chosen_launcher,
    launch,
    launcher_command,
    launcher_problem,
    new_spec,
)
from neox.launch.tool_runs import launch_tool
from neox.log import setup_logging
from neox.plan import Capabilities, RunPlan, encode_payload, format_plan, plan_as_dict
from neox.plan.device import gpu_device, memory_on
from neox.plan.fp8 import fp8_problems
from neox.plan.precision import settle_precision
from neox.plan.report import labelled
from neox.plan.search import Suggestion
from neox.plan.search_start import divisible_config
from neox.preflight.checks import nvme_paths
from neox.preflight.data_checks import data_prefixes
from neox.preflight.fit_hosts import can_change_hosts, fit_hosts, too_few_hosts, with_spares
from neox.preflight.host_checks import capabilities_of, check_compilers, check_memory, hosts_without_room
from neox.preflight.measure import measure_layouts
from neox.preflight.next_steps import next_steps
from neox.preflight.own_run import finished_note, unfinished_note
from neox.preflight.planning import Job, PlannedJob, plan_job, read_config
from neox.preflight.plot import draw_schedules
from neox.preflight.recovery import recovery_lines
from neox.preflight.restarts import Restarts
from neox.preflight.run_directory import claim_curves, run_directory, write_run_directory
from neox.preflight.suggest import (
    SHOWN,
    find_layouts,
    format_estimates,
    format_measurement,
    layouts_to_measure,
    write_keys,
)
from neox.problems import Problem
from neox.storage import ids_file

_TOKENIZER_FILES = ("vocab_file", "merge_file")
_FOUND_FOR_EACH = 10  # layouts that are searched for each that is measured, so that other degrees are among them
_MOST_GROUPS = 5  # lines about hosts in a plan that is not verbose


def main() -> int:
    """Run `deepy.py` with this process's command line.

    Returns:
        The exit status: that of the run, or 0.

    Raises:
        ConfigError: The configuration is wrong; with every problem.
        LaunchError: The run cannot be started.
    """
    setup_logging()
    if len(sys.argv) > 1 and (status := _run_tool(sys.argv[1], sys.argv[2:])) is not None:
        return status
    arguments = parse_arguments()
    command = _Command(arguments, read_config(arguments))
    if arguments.script == "doctor":
        return command.doctor()
    if arguments.suggest is not None:
        return command.suggest()
    if arguments.dry_run:
        return command.show()
    return command.start()


def _run_tool(name: str, words: Sequence[str]) -> int | None:
    """Run a tool, which has no configuration, and return its exit status; None if the name is not a tool's."""
    if Path(name).stem in TOOLS:
        return launch_tool(find_script(name), words, child_environment())
    tool = find_lone_tool(name)
    if tool is not None:
        os.execv(sys.executable, [sys.executable, str(tool), *words])
    return None


@dataclass(frozen=True)
class _Prepared:
    """A run that can be started.

    Attributes:
        job: What ranks are to run, and where.
        planned: Its plan.
        runner: Keys about its hosts.
        reports: Reports of the hosts, if they have been asked.
        must_ask: Whether the hosts must be asked before the start.
        left_out: Names of the hosts that do not take part, with what is done about each.
    """

    job: Job
    planned: PlannedJob
    runner: RunnerConfig
    reports: list[HostReport]
    must_ask: bool
    left_out: Mapping[str, str] = field(default_factory=dict)


class _Command:
    """What one command line asks for.

    Args:
        arguments: The command line.
        config: Its configuration.
    """

    def __init__(self, arguments: argparse.Namespace, config: NeoXConfig) -> None:
        self.arguments = arguments
        self.config = config
        self.runner = config.runner
        launch_variables = launch_environment(self.runner.forward_environment)
        self.environment = launch_variables.variables
        self.forwarded = launch_variables.forwarded
        self.of_hosts = launch_variables.of_hosts
        self.save: Path | None = None
        if config.checkpoint.save:
            self.save = Path(config.checkpoint.save).absolute()

    def doctor(self) -> int:
        """Check all hosts and print the table; return 1 if something is to be fixed."""
        placement = with_spares(place_ranks(self.runner, self.config.source("hostfile")))
        reports = self._examine_hosts(self._empty_spec(placement, Path()))
        print(format_reports(reports))
        if self.config.given("vocab_file"):
            files = ", ".join(map(self.config.describe_setting, self._tokenizer_keys()))
            print(f"tokenizer, whose files every host needs: {files}")
        return int(_have_problems(reports))

    def show(self) -> int:
        """Print the plan; problems are warnings. Return 2 if it does not fit, and nothing was assumed."""
        job, planned, warnings = self._plan_without_run()
        placement = job.placement
        imagined = self.arguments.hosts or self.arguments.gpus  # such hosts need no programs
        warnings += self._launcher_problems(placement, None if imagined else self.environment["PATH"])
        spec = self._spec(job, planned, self._run_directory())
        commands = {}
        try:
            commands = self._commands(spec)
        except LaunchError as error:  # too long, for example
            warnings.append(str(error))
        if not self.arguments.json:
            warnings = [_in_short(warning, planned.too_large) for warning in warnings]
        _print_to_stderr("warning", warnings)
        if self.arguments.plot:
            draw_schedules(planned.plan, Path(self.arguments.plot))
        if self.arguments.json:
            about = {"hosts": _hosts(planned.plan, placement), "warnings": warnings, **commands}
            print(json.dumps({**plan_as_dict(planned.plan, planned.device), **about}))
        else:
            self._print_plan(planned, placement, spec)
        is_guess = placement.chosen_by is ChosenBy.ASSUMPTION or planned.device.assumed
        return 0 if planned.fits or is_guess else 2

    def suggest(self) -> int:
        """Print the fastest layouts; problems are warnings. With `--measure`, run them and print them again."""
        placement, _ = choose_hosts(self.config, self.arguments)
        self.config, changed = divisible_config(self.config, placement.world_size)
        _, planned, problems = self._plan_without_run()
        _print_to_stderr("warning", problems)
        plan = planned.plan
        device = planned.device if self.arguments.measure else gpu_device(plan)
        count = max(SHOWN, _FOUND_FOR_EACH * (self.arguments.measure or 0))
        found, title = find_layouts(plan, device, self.arguments.suggest, changed, count)
        print(format_estimates(found, title, plan, is_changed=bool(changed)), flush=True)
        if self.arguments.measure:
            layouts = layouts_to_measure(found, self.arguments.measure, is_changed=bool(changed))
            return self._measure(layouts, plan.grid.world_size)
        self._write_layout(found.best[0])
        return 0

    def _measure(self, layouts: Sequence[Suggestion], ranks: int) -> int:
        """Run layouts for a few steps and print them by their measured time. Return 128 + the signal that ended it."""
        if self.runner.launcher == "none":
            raise ConfigError(
                self.config.problem("launcher", "starts nothing that --measure could time; use another one")
            )
        measurement = measure_layouts(layouts, plain_command(self.arguments), self._run_directory())
        best = measurement.layouts[0] if measurement.layouts else None
        if best is None:
            print("no layout was measured", file=sys.stderr)
        else:
            print(format_measurement(measurement, ranks))
            if best.seconds is None:
                raise LaunchError(f"every measured layout failed, the first with: {best.failure}")
            self._write_layout(best.layout)
        return 0 if measurement.stopped_by is None else 128 + measurement.stopped_by

    def _write_layout(self, layout: Suggestion) -> None:
        output = self.arguments.suggest_output
        if output is not None:
            print(write_keys(layout, self.config, Path(output)))

    def _plan_without_run(self) -> tuple[Job, PlannedJob, list[str]]:
        """Return the job, its plan, and what is wrong, for a command that starts nothing."""
        placement, warnings = choose_hosts(self.config, self.arguments)
        can_change_hosts(self.config, placement)  # refuses spare hosts that the launcher cannot use
        job = Job(find_script(self.arguments.script), placement, dry_run=True)
        planned = plan_job(self.config, job, self._capabilities_without_run(placement))
        return job, planned, [*warnings, *map(str, planned.problems)]

    def start(self) -> int:
        """Check everything that can be known before ranks start, then start the run and follow it.

        A training that fails is started again up to `max_restarts` times.
        """
        script = find_script(self.arguments.script)
        restarts = Restarts(self.config, script)
        with ExitStack() as held, AgentProcesses() as agents:
            prepared = self._prepare(script, restarts)
            directory = reserve(self._run_directory(), self.save, script.name, held)
            if prepared.job.trains and self._has_finished(prepared.planned.plan, directory):
                return 0
            if prepared.job.trains and (note := claim_curves(directory, self.config)) is not None:
                _print_to_stderr("note", [note])
            with restarts.recording_refusals(directory):
                end = self._launch(prepared, directory, restarts, agents)
            while restarts.follow(end, directory):
                with restarts.recording_refusals(directory):
                    self.config = restarts.next_config()
                    try:
                        prepared = self._prepare(script, restarts)
                        end = self._launch(prepared, directory, restarts, agents)
                    except UnreachableHostError as error:  # it may be back after a pause
                        end = _end_without_start(error)
            if prepared.job.trains:
                self._print_what_follows(prepared.planned.plan, end)
            return end.status

    def _has_finished(self, plan: RunPlan, directory: Path) -> bool:
        """Return whether nothing is left of a training; if so, print it, and the commands that use the model."""
        note = finished_note(plan.config, directory)
        if note is None:
            return False
        _print_to_stderr("note", [note])
        self._print_next_steps(plan)
        return True

    def _print_what_follows(self, plan: RunPlan, end: RunEnd) -> None:
        """Print how to go on with a run that was asked to end, or the commands that use a finished one."""
        rest = unfinished_note(plan.config)
        if rest is not None and (end.status == 0 or end.kind is EndKind.ASKED):
            _print_to_stderr("note", [rest])
        elif end.status == 0:
            self._print_next_steps(plan)

    def _print_next_steps(self, plan: RunPlan) -> None:
        print(*next_steps(self.arguments, plan), sep="\n", file=sys.stderr)

    def _prepare(self, script: Path, restarts: Restarts) -> _Prepared:
        """Plan a run, and check everything that can be known before its directory is used.

        Raises:
            ConfigError: The configuration is wrong.
            LaunchError: The run cannot be started on these hosts.
        """
        placement, warnings = choose_hosts(self.config, self.arguments)
        _print_to_stderr("warning", warnings)
        restarts.can_move = can_change_hosts(self.config, placement)
        if restarts.can_move:
            return self._prepare_on_fit_hosts(placement, script, restarts)
        job = Job(script, placement, dry_run=False, environment=self.environment)
        over_ssh = chosen_launcher(placement.hosts, self.runner) == "pdsh" and not self.runner.no_ssh_check
        asked_first = over_ssh and self.config.model.precision == "auto"  # the plan depends on the hosts' answers
        reports: list[HostReport] = []
        capabilities = Capabilities()
        if asked_first:
            reports = self._check_hosts(self._empty_spec(placement, job.script), restarts)
            capabilities = capabilities_of(reports)
        elif placement.is_local:
            capabilities = Capabilities.of_hosts([native_formats()])
        planned = plan_job(self.config, job, capabilities)
        self._refuse_problems(planned, placement)
        return _Prepared(job, planned, self.runner, reports, must_ask=over_ssh and not asked_first)

    def _prepare_on_fit_hosts(self, placement: Placement, script: Path, restarts: Restarts) -> _Prepared:
        """Ask the hosts of a placement and its spare hosts, and plan a run on those that can take part.

        Raises:
            ConfigError: The configuration is wrong.
            LaunchError: Too few hosts can take part.
        """
        spec = self._empty_spec(with_spares(placement), script)
        if restarts.lost:
            with suppress(LaunchError):  # else they are asked once more, and waited for
                reports = self._examine_hosts(spec, restarts, lost=restarts.lost)
                return self._plan_on_fit_hosts(placement, script, restarts, reports)
        reports = self._examine_hosts(spec, restarts)
        return self._plan_on_fit_hosts(placement, script, restarts, reports)

    def _plan_on_fit_hosts(
        self, placement: Placement, script: Path, restarts: Restarts, reports: Sequence[HostReport]
    ) -> _Prepared:
        """Plan a run on the hosts that can take part. Only the plan shows which hosts have too little memory."""
        unfit = dict(restarts.unfit)
        while True:
            fit = fit_hosts(self.config, placement, reports, unfit, restarts.suspects)
            job = Job(script, fit.placement, dry_run=False, environment=self.environment)
            planned = plan_job(fit.config, job, capabilities_of(fit.reports))
            self._refuse_problems(planned, fit.placement)
            without_room: Mapping[str, str] = {}
            if job.runs_model:
                without_room = hosts_without_room(planned.plan, fit.reports, training=job.trains)
            if not without_room:
                return _Prepared(job, planned, fit.config.runner, fit.reports, must_ask=False, left_out=fit.left_out)
            unfit |= without_room

    def _refuse_problems(self, planned: PlannedJob, placement: Placement) -> None:
        """Raise ConfigError or LaunchError if a planned job cannot be started on its hosts."""
        unable = self._launcher_problems(placement, self.environment["PATH"])
        if planned.problems:
            raise ConfigError([*planned.problems, *unable])
        if unable:
            raise LaunchError(unable[0])

    def _launch(self, prepared: _Prepared, directory: Path, restarts: Restarts, agents: AgentProcesses) -> RunEnd:
        """Start a prepared run, and follow it until it ends."""
        plan = prepared.planned.plan
        spec = self._spec(prepared.job, prepared.planned, directory, prepared.runner)
        notes = list(plan.notes)
        reports = prepared.reports
        if prepared.must_ask:
            reports = self._check_hosts(spec, restarts)
            notes += _check_formats(plan, capabilities_of(reports))
        if prepared.job.runs_model:
            check_memory(plan, reports, training=prepared.job.trains)
        if prepared.job.trains:
            check_compilers(plan, reports, self.environment)
        _print_to_stderr("note", notes)
        write_run_directory(directory, plan, prepared.planned.device, self._commands(spec))
        restarts.starting(spec, directory, prepared.left_out, plan.batch.train_batch_size)
        return launch(spec, prepared.runner, self.environment, self.forwarded, advice=restarts.advice, agents=agents)

    def _capabilities_without_run(self, placement: Placement) -> Capabilities:
        """Return what this machine multiplies natively, if a dry run depends on it and ranks would run here."""
        depends = self.config.model.precision == "auto" or self.config.training.fp8 is not None
        if depends and placement.is_local:
            return Capabilities.of_hosts([native_formats()])
        return Capabilities()

    def _launcher_problems(self, placement: Placement, path: str | None) -> list[str]:
        """Return why the launcher cannot start ranks.

        Args:
            placement: Hosts and slots.
            path: `PATH` in which its program is looked for; None not to look.
        """
        problem = launcher_problem(placement.hosts, self.runner, path)
        return [problem] if problem else []

    def _print_plan(self, planned: PlannedJob, placement: Placement, spec: LaunchSpec) -> None:
        launcher = chosen_launcher(spec.hosts, self.runner)
        verbose = self.arguments.verbose
        groups = list(map(str, host_groups(planned.plan.grid, placement.hosts)))
        if not verbose and len(groups) > _MOST_GROUPS:
            hidden = len(groups) - (_MOST_GROUPS - 1)
            groups = [*groups[: _MOST_GROUPS - 1], f"and {hidden} more groups of hosts"]
        title = f"{len(placement.hosts)} ({placement.why}), launcher {launcher}"
        print("\n".join(labelled("hosts", [title, *groups])))
        training = Path(spec.script).stem not in INFERENCE
        recovery = list(recovery_lines(self.config, placement))
        if training and recovery:
            print("\n".join(labelled("recovery", recovery)))
        print(format_plan(planned.plan, planned.device, training=training, verbose=verbose))
        if verbose:
            print("\n".join(labelled("command", format_commands(spec, launcher))))
        else:
            print("--verbose shows every stage, the source of every key, DeepSpeed's configuration and the commands")

    def _run_directory(self) -> Path:
        return run_directory(self.config.logging.log_dir, self.arguments.conf_file[0])

    def _spec(self, job: Job, planned: PlannedJob, directory: Path, runner: RunnerConfig | None = None) -> LaunchSpec:
        """Return the launch of a planned job."""
        rank_bytes = None
        save = None
        warm_module = None
        if job.trains and self.config.healing.max_restarts and is_own_script(str(job.script)):
            warm_module = "neox.train"
        if job.trains:
            rank_bytes = memory_on(planned.plan, planned.device).needed(on_cpu=planned.device.shared)
            save = self.save
        return new_spec(
            job.placement,
            runner or self.runner,
            job.script,
            ("--payload", encode_payload(planned.plan)),
            directory,
            self.environment,
            self.forwarded,
            of_hosts=self.of_hosts,
            save=save,
            hang_timeout=self.config.training.hang_timeout,
            healing=self.config.healing,
            rank_bytes=rank_bytes,
            warm_module=warm_module,
            answers_interrupts=job.script.stem == "generate" and self.config.generation.text_gen_type == "chat",
        )

    def _empty_spec(self, placement: Placement, script: Path) -> LaunchSpec:
        """Return a launch without a plan, with which hosts are checked."""
        healing = self.config.healing
        return new_spec(
            placement, self.runner, script, (), Path.cwd(), self.environment, self.forwarded, healing=healing
        )

    def _commands(self, spec: LaunchSpec) -> dict[str, Any]:
        """Return the commands of this process and of every host, and of the same ranks under DeepSpeed's launcher."""
        launcher = chosen_launcher(spec.hosts, self.runner)
        own = launcher_command(spec, self.runner, forwarded_secrets(self.environment, self.forwarded))
        return {
            "launcher": launcher,
            "launch": None if own is None else join(own),
            "commands": list(map(vars, host_commands(spec, launcher))),
            "deepspeed_launcher": join(deepspeed_command(spec)),
        }

    def _check_hosts(self, spec: LaunchSpec, restarts: Restarts) -> list[HostReport]:
        """Check every host and return the reports. Raises LaunchError for a host with a problem."""
        reports = self._examine_hosts(spec, restarts)
        if _have_problems(reports):
            raise too_few_hosts(f"nothing was started:\n{format_reports(reports)}", reports)
        return reports

    def _tokenizer_keys(self) -> Iterator[str]:
        """Yield the keys of the tokenizer's files that were given."""
        for key in _TOKENIZER_FILES:
            if self.config.given(key):
                yield key

    def _files_of_every_host(self) -> Iterator[str]:
        """Yield the absolute paths of the token files and the tokenizer's files, which every rank reads."""
        for prefix in data_prefixes(self.config):
            yield str(ids_file(prefix).absolute())
        if self.config.tokenizer.tokenizer_type == "TiktokenTokenizer":  # its vocab_file may be the name of an encoding
            return
        for key in self._tokenizer_keys():
            yield str(Path(self.config.value(key)).absolute())

    def _examine_hosts(
        self, spec: LaunchSpec, restarts: Restarts | None = None, *, lost: frozenset[str] = frozenset()
    ) -> list[HostReport]:
        """Check every host, with the paths of this configuration. Those that were lost are not waited for."""
        checks = Checks(
            save_paths=() if self.save is None else (str(self.save),),
            local_paths=nvme_paths(self.config),
            data_paths=tuple(self._files_of_every_host()),
            ssh_port=self.runner.ssh_port,
            seconds=self.runner.doctor_timeout,
            always_ssh=len(spec.hosts) > 1,
            links=restarts is None or restarts.doubts_links,
            lost=lost,
            awaited=frozenset() if restarts is None else restarts.awaited,
        )
        return examine(spec, checks, self.environment)


def _end_without_start(error: UnreachableHostError) -> RunEnd:
    """Print why a restart has failed, and return it as another end of the run."""
    print(f"error: {error}", file=sys.stderr)
    return RunEnd(EndKind.NOT_STARTED, error.exit_code, error.cause, hosts=error.hosts)


def _in_short(warning: str, too_large: Sequence[Problem]) -> str:
    """Return a warning without what the plan says, too: the settings with which a run would fit."""
    if warning not in map(str, too_large):
        return warning
    needed, verdict, _ = warning.partition(": does not fit")
    if not verdict:
        return warning
    return f"{needed}{verdict}; the plan has under `memory` what would"


def _have_problems(reports: Sequence[HostReport]) -> bool:
    return any(report.problems for report in reports)


def _check_formats(plan: RunPlan, capabilities: Capabilities) -> list[str]:
    """Return notes on the precision of a plan on hosts that were asked after it was made.

    Raises:
        ConfigError: The hosts cannot multiply in fp8.
    """
    if problems := list(fp8_problems(plan, capabilities)):
        raise ConfigError(problems)
    _, notes = settle_precision(plan.config, capabilities)
    return notes


def _print_to_stderr(kind: str, lines: Sequence[str]) -> None:
    for line in lines:
        print(f"{kind}: {line}", file=sys.stderr)


def _hosts(plan: RunPlan, placement: Placement) -> list[Mapping[str, Any]]:
    hosts: list[Mapping[str, Any]] = []
    for host in ranks_of_hosts(plan.grid, placement.hosts):
        hosts.append({"name": host.names[0], "slots": host.slots, "ranks": host.ranks, "stages": host.stages})
    return hosts
