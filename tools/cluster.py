#!/usr/bin/env python3
# PYTHON_ARGCOMPLETE_OK
"""End one run, copy this directory to every host, or run a command on every host.

python tools/cluster.py kill runs/20B              # SIGTERM: ranks save a checkpoint; --now does not wait for that
python tools/cluster.py sync -H hostfile           # rsync to the same path; --delete removes what is not here
python tools/cluster.py run -H hostfile nvidia-smi -L
"""

from __future__ import annotations

import shlex
import signal
from collections.abc import Iterator
from pathlib import Path

import _checkout  # noqa: F401

from neox.arguments import ScriptParser
from neox.errors import ConfigError, LaunchError, run_script
from neox.launch.commands import module_command, ssh_options
from neox.launch.environment import child_environment
from neox.launch.hosts.hostfile import is_this_machine
from neox.launch.spec import LaunchSpec
from tools.cluster.every_host import command_on, named_hosts, print_commands, run_on_hosts

_LEFT_OUT = ("/runs/", "/.git/", "__pycache__/")


def parser() -> ScriptParser:
    """Return the parser of the tool's flags."""
    made = ScriptParser(description=__doc__)
    tasks = made.add_subparsers(dest="task", required=True)
    kill = tasks.add_parser(
        "kill",
        help="end one run, and no other process",
        description="End one run on all its hosts, and no other process.",
        parents=[_ssh_port()],
    )
    kill.add_argument("run", type=Path, help="run directory: log_dir, or runs/ and the first file's name")
    kill.add_argument("--now", action="store_true", help="SIGKILL: ranks save nothing")
    sync = tasks.add_parser(
        "sync",
        help="copy this directory to the same path",
        description="Copy this directory to the same path on every host, with rsync.",
        parents=[_hosts(), _ssh_port()],
    )
    sync.add_argument("path", type=Path, nargs="?", default=Path(), help="another directory, or a file")
    sync.add_argument("--delete", action="store_true", help="remove there what is not here")
    run = tasks.add_parser(
        "run",
        help="run a command in this directory",
        description="Run a command on every host. Flags of this tool come before the command.",
        parents=[_hosts(), _ssh_port()],
    )
    run.add_argument("command", nargs="...", help="the command and its arguments")
    for task in (kill, sync, run):
        task.add_argument("--dry-run", action="store_true", help="print every host's command, and start nothing")
    return made


def _ssh_port() -> ScriptParser:
    shared = ScriptParser(add_help=False)
    shared.add_argument("--ssh-port", type=int, help="port of the ssh servers")
    return shared


def _hosts() -> ScriptParser:
    shared = ScriptParser(add_help=False)
    shared.add_argument("-H", "--hostfile", "--hosts", required=True, help="hostfile, or names a,b")
    return shared


def main() -> int:
    """Run the tool."""
    args = parser().parse_args()
    environment = child_environment()
    options = shlex.split(environment.get("PDSH_SSH_ARGS_APPEND", ""))
    if args.task == "kill":
        commands = _kill(args.run, args.ssh_port, options, now=args.now)
    elif args.task == "sync":
        commands = _sync(args.hostfile, args.path, args.ssh_port, options, delete=args.delete)
    else:
        if not args.command:
            raise ConfigError("run: the command is missing")
        if "--dry-run" in args.command and args.command[0] != "--":
            raise ConfigError(
                "run: --dry-run stands after the command; put it before, or -- before a command that takes it"
            )
        words = ["env", "-C", str(Path.cwd()), *args.command]
        commands = {}
        for host in named_hosts(args.hostfile):
            commands[host] = command_on(host, words, args.ssh_port, options)
    if args.dry_run:
        print_commands(commands)
        return 0
    return run_on_hosts(commands, environment)


def _kill(directory: Path, ssh_port: int | None, options: list[str], *, now: bool) -> dict[str, list[str]]:
    """Return the command that signals the agent of a run on each of its hosts."""
    spec = _run_of(directory)
    signum = signal.SIGKILL if now else signal.SIGTERM
    commands = {}
    for number, host in enumerate(spec.hosts):
        module = module_command(spec, "neox.launch.hosts.remote")
        words = [*module, "signal", spec.run_id, str(number), str(int(signum))]
        commands[host.name] = command_on(host.name, words, ssh_port, options)
    return commands


def _run_of(directory: Path) -> LaunchSpec:
    """Return the specification in `command.txt` of a run directory.

    Raises:
        ConfigError: There is none.
    """
    file = directory / "command.txt"
    try:
        text = file.read_text()
    except OSError as error:
        raise ConfigError(f"{file} cannot be read ({error.strerror}); give the run directory of a run") from None
    for word in _words(text):
        try:
            return LaunchSpec.decode(word)
        except LaunchError:
            continue
    raise ConfigError(f"{file} holds no run that was launched from here; end it where it was started")


def _words(text: str) -> Iterator[str]:
    """Yield the words that are long enough to be a specification. It is base64, so it contains no quotes."""
    for word in text.replace("'", " ").replace('"', " ").split():
        if len(word) > 100:
            yield word


def _sync(hosts: str, path: Path, ssh_port: int | None, options: list[str], *, delete: bool) -> dict[str, list[str]]:
    """Return the rsync command for each other host."""
    if not path.exists():
        raise ConfigError(f"{path} does not exist")
    source = str(path.absolute())
    if path.is_dir():
        source += "/"  # rsync copies what is in it
    # rsync divides this text at blanks, and knows quotes
    shell = shlex.join(["ssh", *options, *ssh_options(ssh_port)])
    flags = ["-a", "--mkpath", f"--rsh={shell}"]
    flags += [f"--exclude={name}" for name in _LEFT_OUT]
    if delete:
        flags.append("--delete")
    commands = {}
    for host in named_hosts(hosts):
        if not is_this_machine(host):
            commands[host] = ["rsync", *flags, "--", source, f"{host}:{source}"]
    return commands


if __name__ == "__main__":
    run_script(main)
