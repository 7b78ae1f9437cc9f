"""`deepy.py ... --dry-run`: the plan of a run, without starting anything."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from neox.errors import LaunchError
from neox.launch.commands import format_commands
from neox.launch.hosts.host_groups import host_groups, ranks_of_hosts
from neox.launch.hosts.placement import ChosenBy, Placement
from neox.launch.launcher_choice import chosen_launcher
from neox.launch.spec import LaunchSpec
from neox.plan import RunPlan, format_plan, plan_as_dict
from neox.plan.report.text import labelled
from neox.preflight.command_line import INFERENCE
from neox.preflight.job_command import JobCommand, print_to_stderr
from neox.preflight.planning import PlannedJob
from neox.preflight.plot import draw_schedules
from neox.preflight.recovery import recovery_lines
from neox.problems import Problem

_MOST_GROUPS = 5  # lines about hosts in a plan that is not verbose


class DryRun(JobCommand):
    """The command that prints a plan."""

    def show(self) -> int:
        """Print the plan, with what is missing on this machine as warnings and what a start refuses as errors.

            wrong on every machine (`PlannedJob.refused`)              error      2
            too large for its devices or hosts                         warning    2, or 0 if ranks or sizes are assumed
            missing here (`Missing`), launchers' programs, commands    warning    0

        Returns:
            The exit status.
        """
        job, planned, warnings = self.plan_without_run()
        refused = list(map(str, planned.refused))
        warnings = [warning for warning in warnings if warning not in refused]
        placement = job.placement
        imagined = self.arguments.hosts or self.arguments.gpus  # such hosts need no programs
        warnings += self.launcher_problems(placement, None if imagined else self.environment["PATH"])
        spec = self.launch_spec(job, planned, self.run_directory())
        commands = {}
        try:
            commands = self.launch_commands(spec)
        except LaunchError as error:  # too long, for example
            warnings.append(str(error))
        if not self.arguments.json:
            warnings = [_in_short(warning, planned.too_large) for warning in warnings]
        print_to_stderr("warning", warnings)
        print_to_stderr("error", refused)
        if self.arguments.plot:
            draw_schedules(planned.plan, Path(self.arguments.plot))
        if self.arguments.json:
            about = {"hosts": _hosts(planned.plan, placement), "warnings": warnings, "errors": refused, **commands}
            about["missing_device"] = planned.elsewhere
            print(json.dumps({**plan_as_dict(planned.plan, planned.device, notes=planned.notes), **about}))
        else:
            self._print_plan(planned, placement, spec)
        is_guess = placement.chosen_by is ChosenBy.ASSUMPTION or planned.assumes_size
        if refused:
            return 2
        return 0 if planned.fits or is_guess else 2

    def _print_plan(self, planned: PlannedJob, placement: Placement, spec: LaunchSpec) -> None:
        launcher = chosen_launcher(spec.hosts, self.runner)
        verbose = self.arguments.verbose
        groups = list(map(str, host_groups(planned.plan.grid, placement.hosts)))
        if not verbose and len(groups) > _MOST_GROUPS:
            hidden = len(groups) - (_MOST_GROUPS - 1)
            groups = [*groups[: _MOST_GROUPS - 1], f"and {hidden} more groups of hosts"]
        title = f"{len(placement.hosts)} ({placement.why}), launcher {launcher}"
        print("\n".join(labelled("hosts", [title, *groups])))
        if planned.elsewhere is not None:
            print("\n".join(labelled("device", [planned.elsewhere])))
        training = Path(spec.script).stem not in INFERENCE
        recovery = list(recovery_lines(self.config, placement))
        if training and recovery:
            print("\n".join(labelled("recovery", recovery)))
        print(format_plan(planned.plan, planned.device, notes=planned.notes, training=training, verbose=verbose))
        if verbose:
            print("\n".join(labelled("command", format_commands(spec, launcher))))
        else:
            print("--verbose shows every stage, the source of every key, DeepSpeed's configuration and the commands")


def _in_short(warning: str, too_large: Sequence[Problem]) -> str:
    """Return a warning without what the plan says, too: the settings with which a run would fit."""
    if warning not in map(str, too_large):
        return warning
    needed, verdict, _ = warning.partition(": does not fit")
    if not verdict:
        return warning
    return f"{needed}{verdict}; the plan has under `memory` what would"


def _hosts(plan: RunPlan, placement: Placement) -> list[Mapping[str, Any]]:
    hosts: list[Mapping[str, Any]] = []
    for host in ranks_of_hosts(plan.grid, placement.hosts):
        hosts.append({"name": host.names[0], "slots": host.slots, "ranks": host.ranks, "stages": host.stages})
    return hosts
