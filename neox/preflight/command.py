"""The command `deepy.py`: show a plan (`--dry-run`), check hosts (`doctor`), or start a run."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from shlex import join
from typing import Any

import yaml

from neox.config import NeoXConfig
from neox.errors import ConfigError, LaunchError
from neox.files import write_text
from neox.launch.command_line import INFERENCE, TOOLS, find_lone_tool, find_script, parse_arguments
from neox.launch.commands import deepspeed_command, format_commands, host_commands
from neox.launch.doctor import Checks, HostReport, examine, format_reports
from neox.launch.environment import FORWARDED, child_environment, forwarded_secrets, launch_environment
from neox.launch.host_groups import host_groups, ranks_of_hosts
from neox.launch.machine import native_formats
from neox.launch.placement import Placement, choose_hosts, place_ranks
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
from neox.plan import Capabilities, Device, RunPlan, encode_payload, format_plan, host_device, plan_as_dict
from neox.plan.device import host_problem, memory_on
from neox.plan.fp8 import fp8_problems
from neox.plan.precision import settle_precision
from neox.plan.report import labelled
from neox.preflight.checks import memory_problems, nvme_paths, nvme_problems
from neox.preflight.data_checks import data_prefixes
from neox.preflight.planning import build_plan, read_config
from neox.preflight.plot import draw_schedules

_TOKENIZER_FILES = ("vocab_file", "merge_file")
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
    if len(sys.argv) > 1 and Path(sys.argv[1]).stem in TOOLS:
        return launch_tool(find_script(sys.argv[1]), sys.argv[2:], child_environment())
    if len(sys.argv) > 1 and (tool := find_lone_tool(sys.argv[1])) is not None:
        os.execv(sys.executable, [sys.executable, str(tool), *sys.argv[2:]])
    arguments = parse_arguments()
    run = _Run(arguments, read_config(arguments))
    if arguments.script == "doctor":
        return run.doctor()
    if arguments.dry_run:
        return run.show()
    return run.start()


class _Run:
    """What one command line asks for.

    Args:
        arguments: The command line.
        config: Its configuration.
    """

    def __init__(self, arguments: argparse.Namespace, config: NeoXConfig) -> None:
        self.arguments, self.config = arguments, config
        self.runner = config.runner
        self.environment, from_file = launch_environment()
        self.forwarded = (*(self.runner.forward_environment or FORWARDED), *from_file)
        self.save = Path(config.checkpoint.save).absolute() if config.checkpoint.save else None

    def doctor(self) -> int:
        """Check all hosts and print the table; return 1 where something is to be fixed."""
        placement = place_ranks(self.runner, self.config.source("hostfile"))
        reports, table = self._examine_hosts(self._spec(placement, Path(), None, Path.cwd()))
        print(table)
        if self.config.given("vocab_file"):
            names = (self.config.describe_setting(key) for key in _TOKENIZER_FILES if self.config.given(key))
            print(f"tokenizer, whose files every host needs: {', '.join(names)}")
        return 1 if any(report.problems for report in reports) else 0

    def show(self) -> int:
        """Print the plan; problems are warnings."""
        placement, warnings = choose_hosts(self.config, self.arguments)
        script = find_script(self.arguments.script)
        depends = self.config.model.precision == "auto" or self.config.training.fp8 is not None
        asks = depends and placement.is_local
        capabilities = Capabilities.of_hosts([native_formats()]) if asks else Capabilities()
        plan, device, missing = build_plan(self.config, placement, script, capabilities, dry_run=True)
        path = None if self.arguments.hosts or self.arguments.gpus else self.environment["PATH"]
        unable = launcher_problem(placement.hosts, self.runner, path)
        spec = self._spec(placement, script, plan, self._run_directory(), device)
        warnings += [*map(str, missing), *([unable] if unable else [])]
        try:
            commands = self._commands(spec)
        except LaunchError as error:  # too long, for example
            commands, warnings = {}, [*warnings, str(error)]
        for warning in warnings:
            print(f"warning: {warning}", file=sys.stderr)
        if self.arguments.plot:
            draw_schedules(plan, Path(self.arguments.plot))
        if self.arguments.json:
            about = {"hosts": _hosts(plan, placement), "warnings": warnings, **commands}
            print(json.dumps({**plan_as_dict(plan, device), **about}))
            return 0
        launcher, verbose = chosen_launcher(spec.hosts, self.runner), self.arguments.verbose
        groups = host_groups(plan.grid, placement.hosts)
        shown = groups if verbose or len(groups) <= _MOST_GROUPS else groups[: _MOST_GROUPS - 1]
        more = [] if len(shown) == len(groups) else [f"and {len(groups) - len(shown)} more groups of hosts"]
        title = f"{len(placement.hosts)} ({placement.why}), launcher {launcher}"
        print("\n".join(labelled("hosts", [title, *map(str, shown), *more])))
        print(format_plan(plan, device, training=script.stem not in INFERENCE, verbose=verbose))
        if verbose:
            print("\n".join(labelled("command", format_commands(spec, launcher))))
        else:
            print("--verbose shows every stage, the source of every key, DeepSpeed's configuration and the commands")
        return 0

    def start(self) -> int:
        """Check everything that can be known before ranks start, then start the run and follow it."""
        placement, warnings = choose_hosts(self.config, self.arguments)
        script = find_script(self.arguments.script)
        for warning in warnings:
            print(f"warning: {warning}", file=sys.stderr)
        over_ssh = chosen_launcher(placement.hosts, self.runner) == "pdsh" and not self.runner.no_ssh_check
        before_plan = over_ssh and self.config.model.precision == "auto"
        reports, capabilities = [], Capabilities()
        if before_plan:
            reports = self._check_hosts(self._spec(placement, script, None, Path.cwd()))
            capabilities = _capabilities(reports)
        elif placement.is_local:
            capabilities = Capabilities.of_hosts([native_formats()])
        plan, device, problems = build_plan(
            self.config, placement, script, capabilities, dry_run=False, environment=self.environment
        )
        unable = launcher_problem(placement.hosts, self.runner, self.environment["PATH"])
        if problems:
            raise ConfigError([*problems, *([unable] if unable else [])])
        if unable:
            raise LaunchError(unable)
        with ExitStack() as held:
            directory = reserve(self._run_directory(), self.save, script.name, held)
            spec = self._spec(placement, script, plan, directory, device)
            notes = plan.notes
            if over_ssh and not before_plan:
                reports = self._check_hosts(spec)
                capabilities = _capabilities(reports)
                if unable_gpus := list(fp8_problems(plan, capabilities)):
                    raise ConfigError(unable_gpus)
                notes += tuple(settle_precision(plan.config, capabilities)[1])
            _check_memory(plan, spec, reports)
            for note in notes:
                print(f"note: {note}", file=sys.stderr)
            write_run_directory(directory, plan, device, self._commands(spec))
            return launch(spec, self.runner, self.environment, self.forwarded)

    def _run_directory(self) -> Path:
        return run_directory(self.config.logging.log_dir, self.arguments.conf_file[0])

    def _spec(
        self, placement: Placement, script: Path, plan: RunPlan | None, directory: Path, device: Device | None = None
    ) -> LaunchSpec:
        arguments = () if plan is None else ("--payload", encode_payload(plan))
        return new_spec(
            placement,
            self.runner,
            script,
            arguments,
            directory,
            self.environment,
            self.forwarded,
            save=self.save if script.stem == "train" else None,
            hang_timeout=self.config.training.hang_timeout,
            rank_bytes=memory_on(plan, device).needed(on_cpu=device.shared)
            if plan and device and script.stem == "train"
            else None,
        )

    def _commands(self, spec: LaunchSpec) -> dict[str, Any]:
        """Return the command that this process runs, every host's, and the same ranks under DeepSpeed's launcher."""
        launcher = chosen_launcher(spec.hosts, self.runner)
        own = launcher_command(spec, self.runner, forwarded_secrets(self.environment, self.forwarded))
        return {
            "launcher": launcher,
            "launch": None if own is None else join(own),
            "commands": [vars(line) for line in host_commands(spec, launcher)],
            "deepspeed_launcher": join(deepspeed_command(spec)),
        }

    def _check_hosts(self, spec: LaunchSpec) -> list[HostReport]:
        """Check every host and return the reports. Raises LaunchError for a host with a problem."""
        reports, table = self._examine_hosts(spec)
        if any(report.problems for report in reports):
            raise LaunchError(f"nothing was started:\n{table}")
        return reports

    def _files_of_every_host(self) -> Iterator[str]:
        """Yield the token files and the tokenizer's files, which every rank reads."""
        yield from (prefix + ".bin" for prefix in data_prefixes(self.config))
        for key in _TOKENIZER_FILES:
            if self.config.given(key) and self.config.tokenizer.tokenizer_type != "TiktokenTokenizer":  # maybe a name
                yield self.config.value(key)

    def _examine_hosts(self, spec: LaunchSpec) -> tuple[list[HostReport], str]:
        """Check every host, with the paths of this configuration; return the reports, and as a table."""
        checks = Checks(
            save_paths=() if self.save is None else (str(self.save),),
            local_paths=nvme_paths(self.config),
            data_paths=tuple(str(Path(name).absolute()) for name in self._files_of_every_host()),
            ssh_port=self.runner.ssh_port,
            seconds=self.runner.doctor_timeout,
            always_ssh=len(spec.hosts) > 1,
        )
        reports = examine(spec, checks, self.environment)
        return reports, format_reports(reports)


def _capabilities(reports: Sequence[HostReport]) -> Capabilities:
    """Return what all hosts multiply natively."""
    return Capabilities.of_hosts([report.answer["formats"] for report in reports])


def _check_memory(plan: RunPlan, spec: LaunchSpec, reports: Sequence[HostReport]) -> None:
    """Compare what ranks need with every host's main memory, and files with its disk. Raises LaunchError."""
    if Path(spec.script).stem not in ("train", *INFERENCE):
        return
    training = Path(spec.script).stem == "train"
    for number, report in enumerate(reports):
        name, available = report.host.name, report.answer["memory"]
        ranks = range(spec.first_rank(number), spec.first_rank(number) + len(report.host.slots))
        if training and (full := nvme_problems(plan, ranks, name, report.answer["paths"])):
            raise LaunchError(f"nothing was started: {full[0]}")
        if report.answer["accelerators"] and training:
            if problem := host_problem(plan, ranks, name, available):
                raise LaunchError(f"nothing was started: {problem}")
        elif report.answer["accelerators"] == 0:
            device = host_device(plan, ranks, name, available, training=training)
            if problems := memory_problems(plan, device, training=training):
                raise LaunchError(f"nothing was started: {problems[0]}")


def _hosts(plan: RunPlan, placement: Placement) -> list[Mapping[str, Any]]:
    return [
        {"name": host.names[0], "slots": host.slots, "ranks": host.ranks, "stages": host.stages}
        for host in ranks_of_hosts(plan.grid, placement.hosts)
    ]


def run_directory(log_dir: str | None, first_config: str | Path) -> Path:
    """Return the run directory: `log_dir` where set, else `runs/` and the first configuration file's name."""
    return Path(log_dir).absolute() if log_dir else Path("runs", Path(first_config).stem).absolute()


def write_run_directory(directory: Path, plan: RunPlan, device: Device, commands: Mapping[str, Any]) -> None:
    """Write plan.json, deepspeed.json, config.yml and command.txt, replacing those of the last run.

    Args:
        directory: The run directory.
        plan: The plan.
        device: What a rank runs on.
        commands: The `launch` command of this process, and each host's among `commands`.

    Raises:
        LaunchError: The directory cannot be written.
    """
    summary = plan_as_dict(plan, device)
    lines = [join([sys.executable, *sys.argv]), *filter(None, [commands["launch"]])]
    lines += [f"# on {line['host']}\n{line['command']}" for line in commands["commands"]]
    try:
        (directory / "ranks").mkdir(parents=True, exist_ok=True)
        write_text(directory / "plan.json", json.dumps(summary, indent=2) + "\n")
        write_text(directory / "deepspeed.json", json.dumps(summary["deepspeed"], indent=2) + "\n")
        write_text(directory / "config.yml", yaml.safe_dump(plan.config.to_flat(), sort_keys=False))
        write_text(directory / "command.txt", "".join(f"{line}\n" for line in lines))
    except OSError as error:
        raise LaunchError(f"the run directory {directory} cannot be written: {error}; choose another log_dir") from None
