#!/usr/bin/env python3
# PYTHON_ARGCOMPLETE_OK
"""Start a command in a container on every host, and follow it: docker, podman or apptainer over ssh.

python tools/launch_container.py --src $PWD --py python3 --image neox:cuda --hosts hostfile --cmd "python deepy.py ..."

No shell of the container reads the command. {node}, {nodes}, {host} and {master} in it become the host's number, the
number of hosts, the host's name and the first host's name. The first command that fails ends the others.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from shlex import split

import _checkout  # noqa: F401

from neox.arguments import ScriptParser
from neox.errors import ConfigError, run_script
from neox.launch.environment import child_environment
from neox.launch.hosts.hostfile import is_this_machine
from neox.launch.spec import new_run_id
from tools.cluster.containers import ENGINES, Container, split_command
from tools.cluster.every_host import command_on, named_hosts, print_commands, run_on_hosts

_STOP_SECONDS = 30
_STAT_FAILED = 1


def parser() -> ScriptParser:
    """Return the parser of the tool's flags."""
    made = ScriptParser(description=__doc__)
    made.add_argument("--src", type=Path, default=Path(), help="directory to mount and to work in (default: this one)")
    made.add_argument("--py", default="python3", help="interpreter in the image (default: python3)")
    made.add_argument("--image", required=True, help="name of the image, as the engine takes it")
    made.add_argument("--wheel", type=Path, help="wheel to install before the command starts")
    made.add_argument("--cmd", required=True, help="command line, in quotes")
    made.add_argument("--hosts", "-H", "--hostfile", help="hostfile, or names a,b (default: this machine)")
    made.add_argument("--engine", help=f"{', '.join(ENGINES)}, or its path (default: the first installed here)")
    made.add_argument("--mount", action="append", default=[], metavar="PATH[:INSIDE[:ro]]", help="further directory")
    made.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="variable of the command")
    made.add_argument("--no-gpus", action="store_true", help="do not pass the hosts' GPUs")
    made.add_argument("--rdma", action="store_true", help="pass /dev/infiniband, and allow memory to be locked")
    made.add_argument("--shm-size", help="shared memory of the container, such as 16g (default: the host's)")
    made.add_argument("--ssh-port", type=int, help="port of the ssh servers")
    made.add_argument("--dry-run", action="store_true", help="print every host's command, and start nothing")
    return made


def container_of(args: argparse.Namespace) -> Container:
    """Return the container of the flags. Raises ConfigError if a flag is wrong."""
    return Container(
        engine=args.engine or _installed_engine(dry_run=args.dry_run),
        image=args.image,
        source=args.src.absolute(),
        command=split_command(args.cmd),
        python=args.py,
        wheel=None if args.wheel is None else args.wheel.absolute(),
        mounts=tuple(args.mount),
        variables=tuple(args.env),
        gpus=not args.no_gpus,
        rdma=args.rdma,
        shm_size=args.shm_size,
    )


def main() -> int:
    """Run the tool."""
    args = parser().parse_args()
    hosts = named_hosts(args.hosts)
    container = container_of(args)
    environment = child_environment()
    options = split(environment.get("PDSH_SSH_ARGS_APPEND", ""))
    if container.is_apptainer:
        options.append("-tt")  # its command is a child of the connection, and ends with the terminal that -tt makes

    def on_host(host: str, words: list[str]) -> list[str]:
        return command_on(host, words, args.ssh_port, options)

    name = f"neox-{new_run_id()}"
    commands = {}
    checks = {}
    stops = {}
    stat = ["stat", "--printf=", "--", *container.paths()]  # docker would make a directory that is missing
    for number, host in enumerate(hosts):
        commands[host] = on_host(host, container.start(f"{name}-{number}", hosts, number))
        if is_this_machine(host) or not args.dry_run:
            checks[host] = on_host(host, stat)
        if (stop := container.stop(f"{name}-{number}")) is not None:
            stops[host] = on_host(host, stop)
    if status := run_on_hosts(checks, environment):
        if status != _STAT_FAILED:
            return status  # ssh failed
        raise ConfigError("nothing was started: every host must have the paths of --src, --wheel and --mount")
    if args.dry_run:
        print_commands(commands)
        return 0

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    return run_on_hosts(commands, environment, end_all=lambda: _run_each(stops, environment))


def _run_each(commands: Mapping[str, Sequence[str]], environment: Mapping[str, str]) -> None:
    """Run commands one after another; one that fails or hangs does not keep the next from running."""
    for words in commands.values():
        with suppress(subprocess.TimeoutExpired):
            subprocess.run(words, env=environment, capture_output=True, timeout=_STOP_SECONDS, check=False)


def _installed_engine(*, dry_run: bool) -> str:
    for engine in ENGINES:
        if shutil.which(engine, path=os.environ.get("PATH")):
            return engine
    if not dry_run:
        raise ConfigError(f"none of {', '.join(ENGINES)} is installed here; --engine names what the hosts have")
    return ENGINES[0]


if __name__ == "__main__":
    run_script(main)
