"""The command `deepy.py`: show a plan (`--dry-run`), suggest layouts, check hosts (`doctor`), or start a run."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from neox.launch.environment import child_environment
from neox.log import setup_logging
from neox.preflight.command_line import TOOLS, find_lone_tool, find_script, parse_arguments
from neox.preflight.planning import read_config


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
    config = read_config(arguments)
    # Each command is imported once it is known: a plan need not wait for the code that starts and follows runs.
    if arguments.script == "doctor":
        from neox.preflight.start_run import StartRun

        return StartRun(arguments, config).doctor()
    if arguments.suggest is not None:
        from neox.preflight.suggest import SuggestLayouts

        return SuggestLayouts(arguments, config).suggest()
    if arguments.dry_run:
        from neox.preflight.dry_run import DryRun

        return DryRun(arguments, config).show()
    from neox.preflight.start_run import StartRun

    return StartRun(arguments, config).start()


def _run_tool(name: str, words: Sequence[str]) -> int | None:
    """Run a tool, which has no configuration, and return its exit status; None if the name is not a tool's."""
    if Path(name).stem in TOOLS:
        from neox.preflight.tool_runs import launch_tool

        return launch_tool(find_script(name), words, child_environment())
    tool = find_lone_tool(name)
    if tool is not None:
        os.execv(sys.executable, [sys.executable, str(tool), *words])
    return None
