"""The launcher that starts a run, why it cannot, and the specification of the run. Nothing is started here."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import split

from neox.config.sections.healing import HealingConfig
from neox.config.sections.runner import RunnerConfig
from neox.launch.commands import agent_command, openmpi_command, pdsh_launch, slurm_command
from neox.launch.environment import FORWARDED, forwarded_environment
from neox.launch.hosts.hostfile import is_this_machine
from neox.launch.hosts.placement import Placement, slurm_gpus
from neox.launch.hosts.rendezvous import master_address, master_port
from neox.launch.spec import Host, LaunchSpec, code_root, new_run_id

_PROGRAMS = {"pdsh": "pdsh", "slurm": "srun", "openmpi": "mpirun"}
_MAX_NAMED = 3  # hosts in a message


def new_spec(
    placement: Placement,
    runner: RunnerConfig,
    script: Path,
    arguments: tuple[str, ...],
    run_directory: Path,
    environment: Mapping[str, str],
    forwarded: Sequence[str] = FORWARDED,
    *,
    of_hosts: Mapping[str, str] | None = None,
    save: Path | None = None,
    hang_timeout: float | None = None,
    healing: HealingConfig | None = None,
    rank_bytes: int | None = None,
    answers_interrupts: bool = False,
    warm_module: str | None = None,
) -> LaunchSpec:
    """Return the specification of a new run. It gets its own id, and a free port unless one is configured.

    Args:
        placement: Hosts and slots of the run.
        runner: Keys of the configuration about hosts.
        script: Path of the script that ranks run.
        arguments: Arguments of the script.
        run_directory: Directory for the run's logs.
        environment: Variables from which those of the ranks are chosen.
        forwarded: Patterns of the variables that are forwarded.
        of_hosts: Values that each host completes (`neox.launch.environment.LaunchEnvironment`).
        save: Directory for the checkpoints of a training.
        hang_timeout: Seconds without progress after which the run is ended; None for never.
        healing: Keys of the configuration about failures; None for their defaults.
        rank_bytes: Estimated memory of the fullest rank.
        answers_interrupts: Whether the script handles Ctrl-C and continues.
        warm_module: Module that is imported in advance for the next start; None for none.
    """
    healing = healing or HealingConfig()
    reserved = [str(run_directory)]
    if save is not None:
        reserved.append(str(save))
    return LaunchSpec(
        run_id=new_run_id(),
        hosts=placement.hosts,
        master_addr=master_address(placement, runner),
        master_port=master_port(placement, runner),
        script=str(script),
        arguments=arguments,
        directory=str(Path.cwd()),
        code_root=str(code_root()),
        run_directory=str(run_directory),
        python=sys.executable,
        environment=forwarded_environment(environment, forwarded),
        of_hosts=dict(of_hosts or {}),
        reserved=tuple(reserved),
        hang_timeout=hang_timeout,
        stop_timeout=runner.stop_timeout,
        answers_interrupts=answers_interrupts,
        rank_bytes=rank_bytes,
        preemption_command=healing.preemption_command,
        preemption_file=healing.preemption_file,
        preemption_seconds=healing.preemption_seconds,
        warm_module=warm_module,
        spares=placement.spares,
    )


def chosen_launcher(hosts: Sequence[Host], runner: RunnerConfig) -> str:
    """Return the name of the launcher: the configured one, but `local` for `pdsh` if only this machine is used."""
    only_this_machine = len(hosts) == 1 and is_this_machine(hosts[0].name)
    if only_this_machine and runner.launcher == "pdsh" and not runner.force_multi:
        return "local"
    return runner.launcher


def launcher_problem(hosts: Sequence[Host], runner: RunnerConfig, path: str | None = None) -> str | None:
    """Return why the chosen launcher cannot start ranks on these hosts; None if it can.

    Args:
        hosts: Hosts of the run.
        runner: Keys of the configuration about hosts.
        path: Value of PATH, in which to look for the launcher's program; None to skip this check.
    """
    launcher = chosen_launcher(hosts, runner)
    others = [host.name for host in hosts if not is_this_machine(host.name)]
    if launcher == "local" and others:
        names = ", ".join(others[:_MAX_NAMED])
        if len(others) > _MAX_NAMED:
            names += f" and {len(others) - _MAX_NAMED} more"
        return f"launcher: local starts ranks on this machine only, not on {names}; use pdsh"
    with_colon = [host.name for host in hosts if ":" in host.name]
    if launcher == "pdsh" and with_colon:
        return f"launcher: pdsh takes no IPv6 address, such as {with_colon[0]}: write host names"
    counts = {len(host.slots) for host in hosts}
    if launcher == "slurm" and len(counts) > 1:
        return f"launcher: slurm needs the same number of slots on every host, not {sorted(counts)}: set num_gpus"
    if launcher == "slurm" and _asks_slurm_for_gpus():
        for host in hosts:
            if host.slots != tuple(range(len(host.slots))):
                slots = ",".join(map(str, host.slots))
                return (
                    f"launcher: slurm gives a number of devices, and cannot give {host.name} its devices {slots}: "
                    "choose whole hosts, or num_gpus"
                )
    program = _PROGRAMS.get(launcher)
    if program and path is not None and shutil.which(program, path=path) is None:
        return f"launcher: {launcher} needs the program {program}, which is not on PATH; or use another launcher"
    return None


def launcher_command(spec: LaunchSpec, runner: RunnerConfig, secrets: Sequence[str] = ()) -> list[str] | None:
    """Return the command by which this process starts the agents of all hosts; None under `launcher: none`.

    Args:
        spec: The run.
        runner: Keys of the configuration about hosts.
        secrets: Names of secret variables, which mpirun forwards as well.

    Raises:
        LaunchError: The command would be longer than Linux accepts.
    """
    launcher = chosen_launcher(spec.hosts, runner)
    if launcher == "pdsh":
        return pdsh_launch(spec)
    more = split(runner.launcher_args or "")
    if launcher == "slurm":
        return slurm_command(spec, runner.comment, runner.account, gpus=_asks_slurm_for_gpus(), more=more)
    if launcher == "openmpi":
        return openmpi_command(spec, secrets, more)
    if launcher == "local":
        return agent_command(spec, 0, lifeline=True)
    return None


def _asks_slurm_for_gpus() -> bool:
    """Return whether srun is asked for GPUs: not in an allocation without any that slurm knows of."""
    return "SLURM_JOB_ID" not in os.environ or slurm_gpus() > 0
