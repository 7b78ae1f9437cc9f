"""Starting a run with the chosen launcher."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from neox.config.sections.runner import RunnerConfig
from neox.errors import LaunchError
from neox.launch.commands import (
    agent_command,
    openmpi_command,
    pdsh_environment,
    pdsh_launch,
    pdsh_signal,
    slurm_command,
)
from neox.launch.environment import FORWARDED, forwarded_environment, withheld_secrets
from neox.launch.placement import Placement, Request, is_this_machine, master_address, master_port
from neox.launch.secrets import deliver_secrets
from neox.launch.shown import printed_commands
from neox.launch.spec import Host, LaunchSpec, code_root, new_run_id
from neox.launch.supervise import Supervisor

_NEEDS = {"pdsh": "pdsh", "slurm": "srun", "openmpi": "mpirun"}


def new_spec(
    placement: Placement,
    runner: RunnerConfig,
    script: Path,
    arguments: tuple[str, ...],
    run_directory: Path,
    environment: Mapping[str, str],
    forwarded: Sequence[str] = FORWARDED,
    *,
    save: Path | None = None,
    hang_timeout: float | None = None,
) -> LaunchSpec:
    """Describe a new run for every host: it has an id of its own, and a free port unless one is asked for.

    forwarded: patterns of the variables in `environment` that travel. save: where a training writes its checkpoints.
    """
    request = Request.of(runner)
    return LaunchSpec(
        run_id=new_run_id(),
        hosts=placement.hosts,
        master_addr=master_address(placement, request),
        master_port=master_port(placement, request),
        script=str(script),
        arguments=arguments,
        directory=str(Path.cwd()),
        code_root=str(code_root()),
        run_directory=str(run_directory),
        python=sys.executable,
        environment=forwarded_environment(environment, forwarded),
        reserved=tuple(str(path) for path in (run_directory, save) if path is not None),
        hang_timeout=hang_timeout,
        stop_timeout=runner.stop_timeout,
    )


def chosen_launcher(hosts: Sequence[Host], runner: RunnerConfig) -> str:
    """The launcher that is used: `local` for this machine alone, unless another one was asked for by name."""
    if len(hosts) == 1 and is_this_machine(hosts[0].name) and runner.launcher == "pdsh":
        return "pdsh" if runner.force_multi else "local"
    return runner.launcher


def launcher_problem(hosts: Sequence[Host], runner: RunnerConfig, path: str | None = None) -> str | None:
    """Why the chosen launcher cannot start ranks on these hosts, None where it can.

    path: where programs are looked for; without it they are not.
    """
    launcher = chosen_launcher(hosts, runner)
    if launcher == "local" and (others := [host.name for host in hosts if not is_this_machine(host.name)]):
        names = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
        return f"launcher: local starts ranks on this machine only, not on {names}; use pdsh"
    counts = {len(host.slots) for host in hosts}
    if launcher == "slurm" and len(counts) > 1:
        return f"launcher: slurm needs as many slots on every host, but there are {sorted(counts)}: set num_gpus"
    program = _NEEDS.get(launcher)
    if program and path is not None and shutil.which(program, path=path) is None:
        return f"launcher: {launcher} needs the program {program}, which is not on PATH; or use another one"
    return None


def launch(
    spec: LaunchSpec, runner: RunnerConfig, environment: Mapping[str, str], forwarded: Sequence[str] = FORWARDED
) -> int:
    """Start the run, stay until it ends, return its exit status. Raises LaunchError when it cannot start.

    forwarded: patterns of the variables that travel; the secrets among them travel apart.
    """
    if problem := launcher_problem(spec.hosts, runner, environment.get("PATH", os.defpath)):
        raise LaunchError(problem)
    launcher = chosen_launcher(spec.hosts, runner)
    secrets = withheld_secrets(environment, forwarded)
    if launcher == "none":
        print("\n".join(printed_commands(spec, secrets)))
        return 0
    if launcher == "local":
        spec = replace(spec, stdin=f"/proc/{os.getpid()}/fd/0")
    if launcher == "pdsh":
        deliver_secrets(spec, environment, forwarded, runner.ssh_port)
        return _launch_pdsh(spec, pdsh_environment(environment, runner.ssh_port))
    command = head_command(spec, runner, secrets)
    assert command is not None, launcher
    return Supervisor(spec, [command]).run(environment)


def head_command(spec: LaunchSpec, runner: RunnerConfig, secrets: Sequence[str] = ()) -> list[str] | None:
    """The command by which this process starts the agents of all hosts; None where somebody else does.

    secrets: names of variables that mpirun carries besides. Raises LaunchError when it would be too long.
    """
    launcher = chosen_launcher(spec.hosts, runner)
    if launcher == "pdsh":
        return pdsh_launch(spec)
    if launcher == "slurm":
        return slurm_command(spec, runner.comment, runner.account)
    if launcher == "openmpi":
        return openmpi_command(spec, secrets)
    return agent_command(spec, 0, lifeline=True) if launcher == "local" else None


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
