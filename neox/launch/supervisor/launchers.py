"""Start of a run with the chosen launcher."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from shlex import split
from types import TracebackType
from typing import Self

from neox.config.sections.healing import HealingConfig
from neox.config.sections.runner import RunnerConfig
from neox.errors import LaunchError, UnreachableHostError
from neox.launch.agent.agent_files import STOP_RANKS
from neox.launch.commands import (
    MAX_CONNECTIONS,
    SSH_FAILED,
    agent_command,
    check_length,
    module_command,
    more_ssh_options,
    openmpi_command,
    pdsh_environment,
    pdsh_launch,
    pdsh_signal,
    printed_commands,
    slurm_command,
    ssh_command,
)
from neox.launch.environment import FORWARDED, forwarded_environment, forwarded_secrets
from neox.launch.hosts.hostfile import is_this_machine
from neox.launch.hosts.placement import Placement, slurm_gpus
from neox.launch.hosts.rendezvous import master_address, master_port
from neox.launch.orders import signal_order
from neox.launch.spec import Host, LaunchSpec, code_root, new_run_id
from neox.launch.supervisor.agent_processes import AgentProcesses
from neox.launch.supervisor.outcome import EndKind, RunEnd
from neox.launch.supervisor.supervisor import SignalAgents, Supervisor
from neox.log import get_logger

_log = get_logger(__name__)
_PROGRAMS = {"pdsh": "pdsh", "slurm": "srun", "openmpi": "mpirun"}
_KEEPS_AGENTS = ("local", "pdsh")
_SECRETS_SECONDS = 15
_KILL_SECONDS = 10.0  # longer than ssh tries to connect
_LEFT_THERE = "processes of this run may be left there: `pgrep -f neox.launch` shows them"
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


def _asks_slurm_for_gpus() -> bool:
    """Return whether srun is asked for GPUs: not in an allocation without any that slurm knows of."""
    return "SLURM_JOB_ID" not in os.environ or slurm_gpus() > 0


def launch(
    spec: LaunchSpec,
    runner: RunnerConfig,
    environment: Mapping[str, str],
    forwarded: Sequence[str] = FORWARDED,
    *,
    advice: str = "",
    agents: AgentProcesses | None = None,
) -> RunEnd:
    """Start a run and follow it until it ends.

    Args:
        spec: The run.
        runner: Keys of the configuration about hosts.
        environment: Variables of the launcher's processes, and the secrets to send.
        forwarded: Patterns of the variables that are forwarded. Secrets that match are sent separately.
        advice: Line that is printed before the explanation of a failure.
        agents: Processes that lead to the agents, kept from one start to the next; None if there is only one start.

    Returns:
        How the run has ended, with its exit status.

    Raises:
        LaunchError: The run cannot be started.
    """
    problem = launcher_problem(spec.hosts, runner, environment.get("PATH", os.defpath))
    if problem is not None:
        raise LaunchError(problem)
    launcher = chosen_launcher(spec.hosts, runner)
    secrets = forwarded_secrets(environment, forwarded)
    if launcher == "none":
        print("\n".join(printed_commands(spec, secrets)))
        return RunEnd(EndKind.FINISHED, 0)
    if launcher == "local":
        spec = replace(spec, stdin=f"/proc/{os.getpid()}/fd/0")
    values = {name: environment[name] for name in secrets}
    if spec.warm_module is not None and agents is not None and launcher in _KEEPS_AGENTS:
        return _launch_to_stay(spec, runner, environment, values, advice, agents)
    if launcher == "slurm":
        if agents is None:
            spec = replace(spec, warm_module=None)
        return _launch_slurm(spec, runner, environment, advice, agents or AgentProcesses())
    spec = replace(spec, warm_module=None, spares=())
    if launcher == "pdsh":
        send_secrets(spec, values, environment, runner.ssh_port)
        return _launch_pdsh(spec, environment, runner.ssh_port, advice)
    command = launcher_command(spec, runner, secrets)
    assert command is not None, launcher
    if launcher == "openmpi":
        return _launch_openmpi(spec, command, environment, advice)
    return Supervisor(spec, [command], advice=advice).run(environment)


def _launch_to_stay(
    spec: LaunchSpec,
    runner: RunnerConfig,
    environment: Mapping[str, str],
    secrets: Mapping[str, str],
    advice: str,
    agents: AgentProcesses,
) -> RunEnd:
    """Start a run whose agents stay after a failure, and follow it. Agents that have stayed are used again.

    These agents take orders from their standard input, which pdsh does not pass on. So each has its own ssh connection.
    """
    over_ssh = chosen_launcher(spec.hosts_with_agents, runner) == "pdsh"
    new = agents.restart_waiting(spec)
    if over_ssh:
        try:
            send_secrets(spec, secrets, environment, runner.ssh_port, new)
        except LaunchError:
            agents.end_all()  # those that have stayed have begun to start their ranks
            raise
    for number in new:
        host = spec.hosts_with_agents[number]
        command = agent_command(spec, number, lifeline=True)
        if over_ssh:
            command = ssh_command(host, ["exec", *command], runner.ssh_port, more_ssh_options(environment))
            check_length(command[-1])
        agents.start(command, environment, [host.name])
    signal_agents = _signals_as_orders(agents, spec)
    if not over_ssh:
        return Supervisor(spec, (), signal_agents, advice, agents).run(environment)
    with RemoteKills(spec, environment, runner.ssh_port) as kills:
        running = set(range(len(spec.hosts))).difference(new)
        supervisor = Supervisor(
            spec, (), signal_agents, advice, agents, over_ssh=True, kill_agent=kills.start, running=running
        )
        return supervisor.run(environment)


def _launch_slurm(
    spec: LaunchSpec, runner: RunnerConfig, environment: Mapping[str, str], advice: str, agents: AgentProcesses
) -> RunEnd:
    """Start a run with srun, and follow it. Agents that have all stayed after a failure are used again.

    Signals go to the agents as orders, because srun kills all of them when it is terminated.
    """
    if not agents.are_waiting(spec):
        agents.end_all()  # one srun leads to all agents
    if agents.restart_waiting(spec):
        command = launcher_command(spec, runner)
        assert command is not None
        agents.start(command, environment, spec.host_names)
    return Supervisor(spec, (), _signals_as_orders(agents, spec), advice, agents).run(environment)


def _signals_as_orders(agents: AgentProcesses, spec: LaunchSpec) -> SignalAgents:
    """Return a function that sends a signal to the agents of all hosts with ranks as an order."""
    names = spec.host_names

    def signal_agents(number: int) -> None:
        agents.order(names, signal_order(number))

    return signal_agents


def _launch_openmpi(spec: LaunchSpec, command: Sequence[str], environment: Mapping[str, str], advice: str) -> RunEnd:
    """Start a run with mpirun, and follow it. mpirun gets no signal that it does not pass on to the agents."""
    agents = AgentProcesses()

    def signal_agents(number: int) -> None:
        agents.signal(STOP_RANKS if number in (signal.SIGTERM, signal.SIGINT) else number)

    return Supervisor(spec, [command], signal_agents, advice, agents).run(environment)


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


def _launch_pdsh(spec: LaunchSpec, environment: Mapping[str, str], ssh_port: int | None, advice: str) -> RunEnd:
    """Start a run over ssh and follow it. Signals to the agents go over separate connections."""
    variables = pdsh_environment(environment, ssh_port)
    signalling: list[subprocess.Popen[bytes]] = []

    def signal_agents(signum: int) -> None:
        quiet = subprocess.DEVNULL
        command = pdsh_signal(spec, signum)
        signalling.append(subprocess.Popen(command, env=variables, stdin=quiet, stdout=quiet, stderr=quiet))

    try:
        with RemoteKills(spec, environment, ssh_port) as kills:
            supervisor = Supervisor(spec, [pdsh_launch(spec)], signal_agents, advice, kill_agent=kills.start)
            return supervisor.run(variables)
    finally:
        for process in signalling:
            process.kill()
            process.wait()


class RemoteKills:
    """Ssh connections that kill agents that do not respond. Leaving the context waits for them, for at most 10 s.

    Args:
        spec: The run.
        environment: Variables of the ssh processes.
        ssh_port: Port of the ssh servers; None for ssh's own configuration.
    """

    def __init__(self, spec: LaunchSpec, environment: Mapping[str, str], ssh_port: int | None) -> None:
        self._spec = spec
        self._environment = dict(environment)
        self._ssh_port = ssh_port
        self._started: dict[str, subprocess.Popen[bytes]] = {}  # by the host's name

    def __enter__(self) -> Self:
        return self

    def start(self, node_rank: int) -> None:
        """Begin to kill the agent of a host, whose ranks end with it."""
        kill = [*module_command(self._spec, "neox.launch.hosts.remote"), "signal", self._spec.run_id, str(node_rank)]
        kill.append(str(int(signal.SIGKILL)))
        host = self._spec.hosts[node_rank]
        command = ssh_command(host, kill, self._ssh_port, more_ssh_options(self._environment))
        quiet = subprocess.DEVNULL
        try:
            self._started[host.name] = subprocess.Popen(
                command,
                env=self._environment,
                stdin=quiet,
                stdout=quiet,
                stderr=quiet,
                start_new_session=True,  # a Ctrl-C in the terminal must not reach this process
            )
        except OSError as error:
            _log.warning("%s: ssh cannot be started (%s); %s", host.name, error.strerror, _LEFT_THERE)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        deadline = time.monotonic() + _KILL_SECONDS
        for host, process in self._started.items():
            try:
                status = process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                status = process.wait()
            if status:
                _log.warning("%s: the agent there does not respond, and cannot be killed; %s", host, _LEFT_THERE)


def send_secrets(
    spec: LaunchSpec,
    secrets: Mapping[str, str],
    environment: Mapping[str, str],
    ssh_port: int | None,
    numbers: Sequence[int] | None = None,
) -> None:
    """Send secrets to every host through ssh's standard input, into a private file that the agent reads and removes.

    They never appear in a log, or on a command line, which every user of a host can read.

    Args:
        spec: The run.
        secrets: Values of the variables by name.
        environment: Variables of the ssh processes.
        ssh_port: Port of the ssh servers; None for ssh's own configuration.
        numbers: Numbers of the hosts; None for all.

    Raises:
        UnreachableHostError: A host does not answer.
        LaunchError: A host has not accepted them.
    """
    if numbers is None:
        numbers = range(len(spec.hosts))
    if not secrets or not numbers:
        return

    def send(node_rank: int) -> None:
        store = [*module_command(spec, "neox.launch.hosts.remote"), "secrets", spec.run_id, str(node_rank)]
        host = spec.hosts_with_agents[node_rank]
        try:
            done = subprocess.run(
                ssh_command(host, store, ssh_port, more_ssh_options(environment)),
                env=dict(environment),
                input=json.dumps(dict(secrets)),
                capture_output=True,
                text=True,
                timeout=_SECRETS_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            message = f"secrets: no answer from {host.name} within {_SECRETS_SECONDS} s"
            raise UnreachableHostError(message, (host.name,)) from None
        if done.returncode:
            message = f"secrets could not be sent to {host.name}: {done.stderr.strip()[-300:]}"
            if done.returncode == SSH_FAILED:
                raise UnreachableHostError(message, (host.name,))
            raise LaunchError(message)

    with ThreadPoolExecutor(min(MAX_CONNECTIONS, len(numbers))) as pool:
        list(pool.map(send, numbers))
