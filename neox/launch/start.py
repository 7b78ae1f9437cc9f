"""Starting a run with the chosen launcher, and showing how it would be started."""

from __future__ import annotations

from collections.abc import Mapping
from shlex import join

from neox.config.sections.runner import RunnerConfig
from neox.launch.commands import agent_command
from neox.launch.node import deepspeed_launch
from neox.launch.placement import is_this_machine
from neox.launch.spec import LaunchSpec
from neox.launch.supervise import Supervisor


def launch(spec: LaunchSpec, runner: RunnerConfig, environment: Mapping[str, str]) -> int:
    """Start the run, stay until it ends, return its exit status."""
    if len(spec.hosts) == 1 and is_this_machine(spec.hosts[0].name):
        return Supervisor(spec, [agent_command(spec, 0, lifeline=True)]).run(environment)
    raise NotImplementedError


def shown_commands(spec: LaunchSpec, runner: RunnerConfig) -> list[str]:
    """The commands for people: DeepSpeed's launcher on each host, without what carries no meaning to a reader."""
    return [join([*deepspeed_launch(spec, number), spec.script]) for number, _ in enumerate(spec.hosts[:1])]
