"""Tools that run on every slot: scripts without a configuration, which divide their work by rank."""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from neox.config import NeoXConfig
from neox.config.sections.runner import RunnerConfig
from neox.errors import LaunchError
from neox.launch.hosts.placement import place_ranks
from neox.launch.hosts.rendezvous import master_port_problem
from neox.launch.launcher_choice import new_spec
from neox.launch.run_lock import reserve
from neox.launch.supervisor.launchers import launch
from neox.preflight.command_line import add_host_flags
from neox.problems import COMMAND_LINE


def launch_tool(script: Path, argv: Sequence[str], environment: Mapping[str, str]) -> int:
    """Start a tool on every slot.

    Args:
        script: Path of the script. Its function `parser` returns the parser of its flags. Its function `check` refuses
            flags with which no rank could work.
        argv: Flags about hosts, and the tool's own. Paths among them must mean the same on every host.
        environment: Variables of the ranks.

    Returns:
        The run's exit status.

    Raises:
        ConfigError: The hosts are wrong.
        LaunchError: Ranks cannot be started.
        NeoXError: The tool refuses its flags.
    """
    command = parse_tool_command(script, argv)
    placement = place_ranks(command.runner, COMMAND_LINE)
    command.check()
    problem = master_port_problem(placement, command.runner)
    if problem is not None:
        raise LaunchError(problem)
    with ExitStack() as held:
        directory = reserve(Path("runs", script.stem).absolute(), None, script.name, held)
        spec = new_spec(placement, command.runner, script, command.flags, directory, environment)
        return launch(spec, command.runner, environment).status


@dataclass(frozen=True)
class ToolCommand:
    """Command line of a tool that runs on every slot.

    Attributes:
        runner: Keys of the configuration about hosts, which some flags set.
        flags: The tool's own flags.
        check: Function that raises NeoXError if no rank could work with the flags.
    """

    runner: RunnerConfig
    flags: tuple[str, ...]
    check: Callable[[], None]


def parse_tool_command(script: Path, argv: Sequence[str]) -> ToolCommand:
    """Divide a tool's command line into keys about hosts and the tool's own flags.

    A usage error, `--help` and `--version` end the process here, before anything is started or written.
    """
    sys.path.append(str(script.parent))  # so that the script finds its neighbours
    tool = runpy.run_path(str(script), run_name="tool")
    parser = tool["parser"]()
    parser.prog = f"deepy.py {script.name}"
    add_host_flags(parser.add_argument_group("hosts, whose slots divide the work"))
    arguments = parser.parse_args(list(argv))
    host_parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    add_host_flags(host_parser)
    found, flags = host_parser.parse_known_args(list(argv))
    keys = {key: value for key, value in vars(found).items() if value is not None}
    runner = NeoXConfig.from_flat(keys, dict.fromkeys(keys, COMMAND_LINE)).runner
    return ToolCommand(runner, tuple(flags), lambda: tool["check"](arguments))
