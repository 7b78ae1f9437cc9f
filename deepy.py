#!/usr/bin/env python3
"""YAML files -> checked configuration -> DeepSpeed's JSON -> a script on every rank.

python deepy.py train.py -d configs 20B.yml local_setup.yml
python deepy.py train.py -d configs 20B.yml --set global_num_gpus=96 --dry-run
python deepy.py preprocess_data.py -H hostfile --input ... (the tool's own flags; its work is divided over the slots)
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from shlex import join
from typing import TYPE_CHECKING, Any

from neox.config import NeoXConfig, RunPlan, encode_payload, format_plan, plan_as_dict, resolve
from neox.errors import ConfigError, LaunchError, run_script
from neox.head.command_line import INFERENCE, find_script, parse_arguments, refuse_lone_tool
from neox.head.hosts import choose_hosts
from neox.head.planning import build_plan, read_config
from neox.launch.environment import FORWARDED, child_environment, environment_file, withheld_secrets
from neox.launch.host_groups import host_groups, ranks_of_hosts
from neox.launch.placement import Placement, Request, place
from neox.launch.preflight import data_prefixes
from neox.launch.run_directory import run_directory, write_run_directory
from neox.launch.run_lock import reserve
from neox.launch.shown import deepspeed_command, format_commands, host_commands
from neox.launch.spec import LaunchSpec
from neox.launch.start import chosen_launcher, head_command, launch, launcher_problem, new_spec
from neox.launch.tool import TOOLS, launch_tool
from neox.log import setup_logging

if TYPE_CHECKING:
    from neox.launch.doctor import HostReport


def ranks_environment() -> dict[str, str]:
    """Variables for child processes, those of a `.deepspeed_env` file included."""
    return child_environment({**os.environ, **environment_file(os.environ)})


def forwarded_names(config: NeoXConfig, environment: dict[str, str]) -> tuple[str, ...]:
    """Patterns of the variables that travel: the configured ones, and all of a `.deepspeed_env` file."""
    return (*(config.runner.forward_environment or FORWARDED), *environment_file(environment))


def build_spec(
    config: NeoXConfig,
    placement: Placement,
    script: Path,
    script_arguments: tuple[str, ...],
    directory: Path,
    environment: dict[str, str],
) -> LaunchSpec:
    """Describe the launch for every host."""
    return new_spec(
        placement,
        config.runner,
        script,
        script_arguments,
        directory,
        environment,
        forwarded_names(config, environment),
        save=save_directory(config) if script.stem == "train" else None,
        hang_timeout=config.training.hang_timeout,
    )


def save_directory(config: NeoXConfig) -> Path | None:
    """Where checkpoints are written."""
    return Path(config.checkpoint.save).absolute() if config.checkpoint.save else None


def commands_of(spec: LaunchSpec, config: NeoXConfig, environment: dict[str, str]) -> dict[str, Any]:
    """The command that this process runs, every host's, and what the first one's agent starts there."""
    launcher = chosen_launcher(spec.hosts, config.runner)
    head = head_command(spec, config.runner, withheld_secrets(environment, forwarded_names(config, environment)))
    return {
        "launcher": launcher,
        "launch": None if head is None else join(head),
        "commands": [vars(line) for line in host_commands(spec, launcher)],
        "deepspeed_launcher": deepspeed_command(spec),
    }


def show_dry_run(
    plan: RunPlan,
    placement: Placement,
    spec: LaunchSpec,
    environment: dict[str, str],
    warnings: list[str],
    as_json: bool,
) -> None:
    """Print what a dry run answers: one JSON object, or text; warnings go to stderr."""
    try:
        commands = commands_of(spec, plan.config, environment)
    except LaunchError as error:  # too long, say
        commands, warnings = {}, [*warnings, str(error)]
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if as_json:
        hosts: list[dict[str, Any]] = [
            {"name": host.names[0], "slots": host.slots, "ranks": host.ranks, "stages": host.stages}
            for host in ranks_of_hosts(plan.grid, placement.hosts)
        ]
        print(json.dumps({**plan_as_dict(plan), "hosts": hosts, "warnings": warnings, **commands}))
        return
    print(format_plan(plan, training=Path(spec.script).stem not in INFERENCE))
    print(f"hosts     {len(placement.hosts)} ({placement.why})")
    for group in host_groups(plan.grid, placement.hosts):
        print(f"          {group}")
    for index, line in enumerate(format_commands(spec, chosen_launcher(spec.hosts, plan.config.runner))):
        print(f"{'' if index else 'command':<10}{line}")


def examine_hosts(spec: LaunchSpec, config: NeoXConfig, environment: dict[str, str]) -> tuple[list[HostReport], str]:
    """Ask every host about itself, with the paths that this configuration uses; return the answers, and as a table."""
    from neox.launch.doctor import Checks, examine, format_reports  # a dry run does without

    checks = Checks(
        save_paths=tuple(str(path) for path in (save_directory(config),) if path is not None),
        data_paths=tuple(str(Path(prefix + ".bin").absolute()) for prefix in data_prefixes(config)),
        ssh_port=config.runner.ssh_port,
        seconds=config.runner.doctor_timeout,
        always_ssh=len(spec.hosts) > 1,
    )
    reports = examine(spec, checks, environment)
    return reports, format_reports(reports)


def doctor(arguments: argparse.Namespace) -> int:
    """`deepy.py doctor [CONF ...]`: check all hosts, print the table; 1 where something is to be fixed."""
    config = read_config(arguments)
    placement = place(Request.of(config.runner))
    environment = ranks_environment()
    spec = build_spec(config, placement, Path(), (), Path.cwd(), environment)
    reports, table = examine_hosts(spec, config, environment)
    print(table)
    return 1 if any(report.problems for report in reports) else 0


def without_gpus(placement: Placement, reports: list[HostReport]) -> bool:
    """Whether no host has an accelerator, as far as is known."""
    if reports:
        return all(report.answer.get("accelerators") == 0 for report in reports)
    return placement.is_local and placement.accelerators == 0


def prepare(
    arguments: argparse.Namespace,
    config: NeoXConfig,
    placement: Placement,
    script: Path,
    environment: dict[str, str],
    held: ExitStack,
) -> tuple[LaunchSpec, RunPlan]:
    """Check everything that can be known before ranks start, and write the run directory, this run's alone."""
    plan, problems = build_plan(config, placement, script, dry_run=False)
    unable = launcher_problem(placement.hosts, config.runner, environment.get("PATH", os.defpath))
    if problems:
        raise ConfigError([*problems, *([unable] if unable else [])])
    if unable:
        raise LaunchError(unable)
    directory = run_directory(config.logging.log_dir, arguments.conf_file[0])
    directory = reserve(directory, save_directory(config), script.name, held)
    spec = build_spec(config, placement, script, ("--payload", encode_payload(plan)), directory, environment)
    reports: list[HostReport] = []
    if chosen_launcher(spec.hosts, config.runner) == "pdsh" and not config.runner.no_ssh_check:
        reports, table = examine_hosts(spec, config, environment)
        if any(report.problems for report in reports):
            raise LaunchError(f"nothing was started:\n{table}")
    if config.runner.distributed_backend == "nccl" and without_gpus(placement, reports):
        print("note: there is no GPU: distributed_backend nccl becomes gloo", file=sys.stderr)
        config = read_config(arguments, "distributed_backend=gloo")
        plan = resolve(config, plan.grid.world_size, plan.vocab_size)
        spec = replace(spec, arguments=("--payload", encode_payload(plan)))
    for note in plan.notes:
        print(f"note: {note}", file=sys.stderr)
    summary, commands = plan_as_dict(plan), commands_of(spec, config, environment)
    write_run_directory(
        directory,
        plan=summary,
        deepspeed=summary["deepspeed"],
        config=plan.config.to_flat(),
        commands=[
            join([sys.executable, *sys.argv]),
            *filter(None, [commands["launch"]]),
            *(f"# on {line['host']}\n{line['command']}" for line in commands["commands"]),
        ],
    )
    return spec, plan


def main() -> int:
    """Check, then show or start."""
    setup_logging()
    if len(sys.argv) > 1 and Path(sys.argv[1]).stem in TOOLS:
        return launch_tool(find_script(sys.argv[1]), sys.argv[2:], child_environment())
    if len(sys.argv) > 1:
        refuse_lone_tool(*sys.argv[1:])
    arguments = parse_arguments()
    if arguments.script == "doctor":
        return doctor(arguments)
    config = read_config(arguments)
    placement, warnings = choose_hosts(config, arguments)
    script = find_script(arguments.script)
    environment = ranks_environment()
    if arguments.dry_run:
        plan, missing = build_plan(config, placement, script, dry_run=True)
        path = None if arguments.hosts or arguments.gpus else environment.get("PATH", os.defpath)
        unable = launcher_problem(placement.hosts, config.runner, path)
        directory = run_directory(config.logging.log_dir, arguments.conf_file[0])
        spec = build_spec(config, placement, script, ("--payload", encode_payload(plan)), directory, environment)
        warnings += [*missing, *([unable] if unable else [])]
        show_dry_run(plan, placement, spec, environment, warnings, arguments.json)
        return 0
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    with ExitStack() as held:
        spec, plan = prepare(arguments, config, placement, script, environment, held)
        return launch(spec, plan.config.runner, environment, forwarded_names(config, environment))


if __name__ == "__main__":
    run_script(main)
