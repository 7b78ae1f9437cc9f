"""Starting a run with the chosen launcher, and showing how it would be started."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from shlex import join, quote

from neox.config.sections.runner import RunnerConfig
from neox.errors import LaunchError
from neox.launch.commands import (
    agent_command,
    deepspeed_launch,
    openmpi_command,
    pdsh_environment,
    pdsh_launch,
    pdsh_signal,
    slurm_command,
    torchrun_command,
)
from neox.launch.environment import FORWARDED, withheld_secrets
from neox.launch.placement import is_this_machine
from neox.launch.secrets import deliver_secrets
from neox.launch.spec import LaunchSpec
from neox.launch.supervise import Supervisor

_NEEDS = {"pdsh": "pdsh", "slurm": "srun", "openmpi": "mpirun"}


def chosen_launcher(spec: LaunchSpec, runner: RunnerConfig) -> str:
    """The launcher that is used: `local` for this machine alone, unless another one was asked for by name."""
    here = len(spec.hosts) == 1 and is_this_machine(spec.hosts[0].name)
    if runner.launcher == "mvapich":
        raise LaunchError("launcher: mvapich is not supported; use pdsh, slurm, openmpi or none")
    if runner.launcher == "local" and not here:
        others = [host.name for host in spec.hosts if not is_this_machine(host.name)]
        raise LaunchError(f"launcher: local starts ranks on this machine only, not on {', '.join(others)}; use pdsh")
    if here and runner.launcher == "pdsh":
        return "pdsh" if runner.force_multi else "local"
    return runner.launcher


def launch(
    spec: LaunchSpec, runner: RunnerConfig, environment: Mapping[str, str], forwarded: Sequence[str] = FORWARDED
) -> int:
    """Start the run, stay until it ends, return its exit status. Raises LaunchError when it cannot start.

    forwarded: patterns of the variables that travel; the secrets among them travel apart.
    """
    launcher = chosen_launcher(spec, runner)
    if launcher == "none":
        print("\n".join(node_commands(spec)))
        return 0
    program = _NEEDS.get(launcher)
    if program and shutil.which(program, path=environment.get("PATH")) is None:
        raise LaunchError(f"launcher: {launcher} needs the program {program}, which is not on PATH; or use another one")
    if launcher == "local":
        spec = replace(spec, stdin=f"/proc/{os.getpid()}/fd/0")
        return Supervisor(spec, [agent_command(spec, 0, lifeline=True)]).run(environment)
    if launcher == "pdsh":
        deliver_secrets(spec, environment, forwarded, runner.ssh_port)
        return _launch_pdsh(spec, pdsh_environment(environment, runner.ssh_port))
    secrets = withheld_secrets(environment, forwarded)
    command = (
        slurm_command(spec, runner.comment, runner.account) if launcher == "slurm" else openmpi_command(spec, secrets)
    )
    return Supervisor(spec, [command]).run(environment)


def _launch_pdsh(spec: LaunchSpec, environment: Mapping[str, str]) -> int:
    """Over ssh a signal takes a connection of its own; supervision goes on meanwhile."""
    signalling: list[subprocess.Popen[bytes]] = []

    def tell(signum: int) -> None:
        quiet = subprocess.DEVNULL
        command = pdsh_signal(spec, signum)
        signalling.append(subprocess.Popen(command, env=dict(environment), stdin=quiet, stdout=quiet, stderr=quiet))

    try:
        return Supervisor(spec, [pdsh_launch(spec)], tell).run(environment)
    finally:
        for process in signalling:
            process.kill()
            process.wait()


def node_commands(spec: LaunchSpec) -> list[str]:
    """`launcher: none`: what to run on each host, ours (supervised) and torchrun's, as shell lines."""
    there = f"cd {quote(spec.directory)} && "
    lines = []
    for number, host in enumerate(spec.hosts):
        lines += [f"# on {host.name}", there + join(agent_command(spec, number, lifeline=False, plain=True))]
    if len({len(host.slots) for host in spec.hosts}) == 1:
        under_torchrun = ["env", f"PYTHONPATH={spec.code_root}", *torchrun_command(spec, 0)]
        lines += ["# or, under torchrun (no supervision of ours), with --node_rank counting up from 0"]
        lines += [there + join(under_torchrun)]
    return lines


def shown_commands(spec: LaunchSpec, most: int = 8) -> list[dict[str, str]]:
    """For each of the first `most` hosts the command that starts DeepSpeed's launcher there, without the payload.

    Further hosts run the same with their own --node_rank; each command names all hosts, so thousands are megabytes.
    """
    commands = []
    for number, host in enumerate(spec.hosts[:most]):
        commands.append({"host": host.name, "command": join([*deepspeed_launch(spec, number), spec.script])})
    return commands
