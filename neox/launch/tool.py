"""Start a tool on every slot: a script with flags of its own, no configuration, that divides its work by rank."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from neox.config.sections import NeoXConfig
from neox.config.sections.runner import RunnerConfig
from neox.errors import LaunchError
from neox.launch.placement import Request, master_port_problem, place
from neox.launch.run_lock import reserve
from neox.launch.start import launch, new_spec

TOOLS = frozenset({"preprocess_data"})


def launch_tool(script: Path, argv: Sequence[str], environment: Mapping[str, str]) -> int:
    """Start `script` with the flags that are not about hosts, stay until it ends, return its exit status.

    Paths among the flags must mean the same on every host. Raises LaunchError when ranks cannot be started.
    """
    runner, arguments = split_arguments(script.name, argv)
    placement = place(request := Request.of(runner))
    if problem := master_port_problem(placement, request):
        raise LaunchError(problem)
    with ExitStack() as held:
        directory = reserve(Path("runs", script.stem).absolute(), None, script.name, held)
        spec = new_spec(placement, runner, script, arguments, directory, environment)
        return launch(spec, runner, environment)


def split_arguments(script: str, argv: Sequence[str]) -> tuple[RunnerConfig, tuple[str, ...]]:
    """Divide a command line into what says where ranks run, and the tool's own flags."""
    parser = argparse.ArgumentParser(prog=f"deepy.py {script}", allow_abbrev=False, add_help=False)
    parser.add_argument("-H", "--hostfile")
    for flag in ("include", "exclude", "launcher", "master_addr"):
        parser.add_argument(f"--{flag}")
    for flag in ("num_nodes", "num_gpus", "master_port"):
        parser.add_argument(f"--{flag}", type=int)
    found, rest = parser.parse_known_args(list(argv))
    given = {key: value for key, value in vars(found).items() if value is not None}
    return NeoXConfig.from_flat(given, dict.fromkeys(given, "the command line")).runner, tuple(rest)
