"""What the commands of `deepy.py` share: a command line with its configuration, the plan of a job and its launch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from shlex import join
from typing import Any

from neox import is_own_script
from neox.config import NeoXConfig
from neox.launch.commands import deepspeed_command, host_commands
from neox.launch.environment import forwarded_secrets, launch_environment
from neox.launch.hosts.machine import native_formats
from neox.launch.hosts.placement import Placement, choose_hosts
from neox.launch.launcher_choice import chosen_launcher, launcher_command, launcher_problem, new_spec
from neox.launch.spec import LaunchSpec
from neox.plan import Capabilities, encode_payload, static_problems
from neox.plan.devices.device import memory_on
from neox.preflight.command_line import find_script
from neox.preflight.planning import Job, PlannedJob, plan_job
from neox.preflight.run_directory import run_directory
from neox.preflight.spare_hosts import can_change_hosts


class JobCommand:
    """A command about the job of a command line.

    Args:
        arguments: The command line.
        config: Its configuration.
    """

    def __init__(self, arguments: argparse.Namespace, config: NeoXConfig) -> None:
        self.arguments = arguments
        self.config = config
        self.is_sound = not static_problems(config)  # else its plan refuses it, with everything that is wrong
        self.runner = config.runner
        launch_variables = launch_environment(self.runner.forward_environment)
        self.environment = launch_variables.variables
        self.forwarded = launch_variables.forwarded
        self.of_hosts = launch_variables.of_hosts
        self.save: Path | None = None
        if config.checkpoint.save:
            self.save = Path(config.checkpoint.save).absolute()

    def plan_without_run(self) -> tuple[Job, PlannedJob, list[str]]:
        """Return the job, its plan, and what is wrong, for a command that starts nothing."""
        placement, warnings = choose_hosts(self.config, self.arguments)
        can_change_hosts(self.config, placement)  # refuses spare hosts that the launcher cannot use
        job = Job(find_script(self.arguments.script), placement, dry_run=True)
        planned = plan_job(self.config, job, self._capabilities_without_run(placement), is_sound=self.is_sound)
        return job, planned, [*warnings, *map(str, planned.problems)]

    def _capabilities_without_run(self, placement: Placement) -> Capabilities:
        """Return what this machine multiplies natively, if a dry run depends on it and ranks would run here."""
        depends = self.config.model.precision == "auto" or self.config.training.fp8 is not None
        if depends and placement.is_local:
            return Capabilities.of_hosts([native_formats(environment=self.environment)])
        return Capabilities()

    def launcher_problems(self, placement: Placement, path: str | None) -> list[str]:
        """Return why the launcher cannot start ranks.

        Args:
            placement: Hosts and slots.
            path: `PATH` in which its program is looked for; None not to look.
        """
        problem = launcher_problem(placement.hosts, self.runner, path)
        return [problem] if problem else []

    def run_directory(self) -> Path:
        """Return the directory of the run's logs."""
        return run_directory(self.config.logging.log_dir, self.arguments.conf_file[0])

    def launch_spec(self, job: Job, planned: PlannedJob, directory: Path) -> LaunchSpec:
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
            planned.plan.config.runner,
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

    def empty_spec(self, placement: Placement, script: Path) -> LaunchSpec:
        """Return a launch without a plan, with which hosts are checked."""
        healing = self.config.healing
        return new_spec(
            placement, self.runner, script, (), Path.cwd(), self.environment, self.forwarded, healing=healing
        )

    def launch_commands(self, spec: LaunchSpec) -> dict[str, Any]:
        """Return the commands of this process and of every host, and of the same ranks under DeepSpeed's launcher."""
        launcher = chosen_launcher(spec.hosts, self.runner)
        own = launcher_command(spec, self.runner, forwarded_secrets(self.environment, self.forwarded))
        return {
            "launcher": launcher,
            "launch": None if own is None else join(own),
            "commands": list(map(vars, host_commands(spec, launcher))),
            "deepspeed_launcher": join(deepspeed_command(spec)),
        }


def print_to_stderr(kind: str, lines: Sequence[str]) -> None:
    """Print lines such as warnings to standard error, each after what it is."""
    for line in lines:
        print(f"{kind}: {line}", file=sys.stderr)
