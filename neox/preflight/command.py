"""The command `deepy.py`: show a plan (`--dry-run`), check hosts (`doctor`), or start a run."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from shlex import join
from typing import Any

import yaml

from neox.config import Capabilities, NeoXConfig, RunPlan, encode_payload, format_plan, plan_as_dict
from neox.config.precision import settle_precision
from neox.errors import ConfigError, LaunchError
from neox.files import write_text
from neox.launch.command_line import INFERENCE, find_script, parse_arguments, refuse_lone_tool
from neox.launch.commands import deepspeed_command, format_commands, host_commands
from neox.launch.doctor import Checks, HostReport, examine, format_reports
from neox.launch.environment import FORWARDED, child_environment, forwarded_secrets, launch_environment
from neox.launch.hosts import native_formats
from neox.launch.placement import Placement, choose_hosts, host_groups, place_ranks, ranks_of_hosts
from neox.launch.run_lock import reserve
from neox.launch.spec import LaunchSpec
from neox.launch.start import (
    TOOLS,
    chosen_launcher,
    launch,
    launch_tool,
    launcher_command,
    launcher_problem,
    new_spec,
)
from neox.log import setup_logging
from neox.preflight.checks import data_prefixes
from neox.preflight.planning import build_plan, read_config


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
    if len(sys.argv) > 1:
        refuse_lone_tool(*sys.argv[1:])
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
        placement = place_ranks(self.runner)
        reports, table = self._examine_hosts(self._spec(placement, Path(), (), Path.cwd()))
        print(table)
        return 1 if any(report.problems for report in reports) else 0

    def show(self) -> int:
        """Print the plan; problems are warnings."""
        placement, warnings = choose_hosts(self.config, self.arguments)
        script = find_script(self.arguments.script)
        asks = self.config.model.precision == "auto" and placement.is_local
        capabilities = Capabilities.of_hosts([native_formats()]) if asks else Capabilities()
        plan, missing = build_plan(self.config, placement, script, capabilities, dry_run=True)
        path = None if self.arguments.hosts or self.arguments.gpus else self.environment["PATH"]
        unable = launcher_problem(placement.hosts, self.runner, path)
        spec = self._spec(placement, script, ("--payload", encode_payload(plan)), self._run_directory())
        warnings += [*missing, *([unable] if unable else [])]
        try:
            commands = self._commands(spec)
        except LaunchError as error:  # too long, for example
            commands, warnings = {}, [*warnings, str(error)]
        for warning in warnings:
            print(f"warning: {warning}", file=sys.stderr)
        if self.arguments.json:
            about = {"hosts": _hosts(plan, placement), "warnings": warnings, **commands}
            print(json.dumps({**plan_as_dict(plan), **about}))
            return 0
        print(format_plan(plan, training=script.stem not in INFERENCE))
        print(f"hosts     {len(placement.hosts)} ({placement.why})")
        for group in host_groups(plan.grid, placement.hosts):
            print(f"          {group}")
        for index, line in enumerate(format_commands(spec, chosen_launcher(spec.hosts, self.runner))):
            print(f"{'' if index else 'command':<10}{line}")
        return 0

    def start(self) -> int:
        """Check everything that can be known before ranks start, then start the run and follow it."""
        placement, warnings = choose_hosts(self.config, self.arguments)
        script = find_script(self.arguments.script)
        for warning in warnings:
            print(f"warning: {warning}", file=sys.stderr)
        over_ssh = chosen_launcher(placement.hosts, self.runner) == "pdsh" and not self.runner.no_ssh_check
        before_plan = over_ssh and self.config.model.precision == "auto"
        capabilities = Capabilities()
        if before_plan:
            capabilities = self._check_hosts(self._spec(placement, script, (), Path.cwd()))
        elif placement.is_local:
            capabilities = Capabilities.of_hosts([native_formats()])
        plan, problems = build_plan(self.config, placement, script, capabilities, dry_run=False)
        unable = launcher_problem(placement.hosts, self.runner, self.environment["PATH"])
        if problems:
            raise ConfigError([*problems, *([unable] if unable else [])])
        if unable:
            raise LaunchError(unable)
        with ExitStack() as held:
            directory = reserve(self._run_directory(), self.save, script.name, held)
            spec = self._spec(placement, script, ("--payload", encode_payload(plan)), directory)
            notes = plan.notes
            if over_ssh and not before_plan:
                notes += tuple(settle_precision(plan.config, self._check_hosts(spec))[1])
            for note in notes:
                print(f"note: {note}", file=sys.stderr)
            commands = self._commands(spec)
            lines = [f"# on {line['host']}\n{line['command']}" for line in commands["commands"]]
            write_run_directory(
                directory, plan, [join([sys.executable, *sys.argv]), *filter(None, [commands["launch"]]), *lines]
            )
            return launch(spec, self.runner, self.environment, self.forwarded)

    def _run_directory(self) -> Path:
        return run_directory(self.config.logging.log_dir, self.arguments.conf_file[0])

    def _spec(self, placement: Placement, script: Path, arguments: tuple[str, ...], directory: Path) -> LaunchSpec:
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

    def _check_hosts(self, spec: LaunchSpec) -> Capabilities:
        """Check every host and return what all multiply natively. Raises LaunchError for a host with a problem."""
        reports, table = self._examine_hosts(spec)
        if any(report.problems for report in reports):
            raise LaunchError(f"nothing was started:\n{table}")
        return Capabilities.of_hosts([report.answer["formats"] for report in reports])

    def _examine_hosts(self, spec: LaunchSpec) -> tuple[list[HostReport], str]:
        """Check every host, with the paths of this configuration; return the reports, and as a table."""
        checks = Checks(
            save_paths=() if self.save is None else (str(self.save),),
            data_paths=tuple(str(Path(prefix + ".bin").absolute()) for prefix in data_prefixes(self.config)),
            ssh_port=self.runner.ssh_port,
            seconds=self.runner.doctor_timeout,
            always_ssh=len(spec.hosts) > 1,
        )
        reports = examine(spec, checks, self.environment)
        return reports, format_reports(reports)


def _hosts(plan: RunPlan, placement: Placement) -> list[Mapping[str, Any]]:
    return [
        {"name": host.names[0], "slots": host.slots, "ranks": host.ranks, "stages": host.stages}
        for host in ranks_of_hosts(plan.grid, placement.hosts)
    ]


def run_directory(log_dir: str | None, first_config: str | Path) -> Path:
    """Return the run directory: `log_dir` where set, else `runs/` and the first configuration file's name."""
    return Path(log_dir).absolute() if log_dir else Path("runs", Path(first_config).stem).absolute()


def write_run_directory(directory: Path, plan: RunPlan, commands: Sequence[str]) -> None:
    """Write plan.json, deepspeed.json, config.yml and command.txt, replacing those of the last run.

    Args:
        directory: The run directory.
        plan: The plan.
        commands: The command line of `deepy.py`, then each host's.

    Raises:
        LaunchError: The directory cannot be written.
    """
    summary = plan_as_dict(plan)
    try:
        (directory / "ranks").mkdir(parents=True, exist_ok=True)
        write_text(directory / "plan.json", json.dumps(summary, indent=2) + "\n")
        write_text(directory / "deepspeed.json", json.dumps(summary["deepspeed"], indent=2) + "\n")
        write_text(directory / "config.yml", yaml.safe_dump(plan.config.to_flat(), sort_keys=False))
        write_text(directory / "command.txt", "".join(f"{command}\n" for command in commands))
    except OSError as error:
        raise LaunchError(f"the run directory {directory} cannot be written: {error}; choose another log_dir") from None
