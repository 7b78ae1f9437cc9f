"""Start of a run with the chosen launcher.

    launcher   process of `deepy.py` that leads to agents   signals reach agents by     agents can stay after a failure
    --------   ------------------------------------------   -------------------------   -------------------------------
    local      the agent itself                             signals, or orders          yes
    pdsh       one pdsh for all hosts                       a second pdsh               no
    pdsh, if   one ssh for each host, because pdsh passes   orders on standard input    yes
     restarts    no standard input on
    slurm      one srun for all hosts                       orders on standard input    yes, if all of them stay
    openmpi    one mpirun for all hosts                     signals to mpirun           no
    none       none: the commands are printed               nothing                     no

`neox.launch.launcher_choice` says which one is chosen, and why it may be impossible.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import TracebackType
from typing import Self

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
    pdsh_environment,
    pdsh_launch,
    pdsh_signal,
    printed_commands,
    ssh_command,
)
from neox.launch.environment import FORWARDED, forwarded_secrets
from neox.launch.launcher_choice import chosen_launcher, launcher_command, launcher_problem
from neox.launch.orders import signal_order
from neox.launch.spec import LaunchSpec
from neox.launch.supervisor.agent_processes import AgentProcesses
from neox.launch.supervisor.outcome import EndKind, RunEnd
from neox.launch.supervisor.supervisor import SignalAgents, Supervisor
from neox.log import get_logger

_log = get_logger(__name__)
_KEEPS_AGENTS = ("local", "pdsh", "slurm")
_SECRETS_SECONDS = 15
_KILL_SECONDS = 10.0  # longer than ssh tries to connect
_LEFT_THERE = "processes of this run may be left there: `pgrep -f neox.launch` shows them"


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
    secret_names = forwarded_secrets(environment, forwarded)
    if launcher == "none":
        print("\n".join(printed_commands(spec, secret_names)))
        return RunEnd(EndKind.FINISHED, 0)
    secrets = {name: environment[name] for name in secret_names}
    if spec.warm_module is None or agents is None or launcher not in _KEEPS_AGENTS:
        spec = replace(spec, warm_module=None, spares=())
    agents_stay = spec.warm_module is not None
    agents = agents or AgentProcesses()

    if launcher == "slurm":
        return _launch_slurm(spec, runner, environment, advice, agents)
    if launcher == "openmpi":
        return _launch_openmpi(spec, runner, secret_names, environment, advice)
    if launcher == "pdsh" and not agents_stay:
        send_secrets(spec, secrets, environment, runner.ssh_port)
        return _launch_pdsh(spec, environment, runner.ssh_port, advice)
    if launcher == "local":
        spec = replace(spec, stdin=f"/proc/{os.getpid()}/fd/0")
        if not agents_stay:
            command = agent_command(spec, 0, lifeline=True)
            return Supervisor(spec, [command], advice=advice).run(environment)
    return _launch_staying_agents(spec, runner, environment, secrets, advice, agents)


def _launch_staying_agents(
    spec: LaunchSpec,
    runner: RunnerConfig,
    environment: Mapping[str, str],
    secrets: Mapping[str, str],
    advice: str,
    agents: AgentProcesses,
) -> RunEnd:
    """Start a run, here or over ssh, whose agents stay after a failure. Those that have stayed are used again."""
    over_ssh = chosen_launcher(spec.hosts_with_agents, runner) == "pdsh"
    new = agents.restart_waiting(spec)  # numbers of the hosts that need a new agent
    if over_ssh:
        try:
            send_secrets(spec, secrets, environment, runner.ssh_port, new)
        except LaunchError:
            agents.end_all()  # those that have stayed have begun to start their ranks
            raise
    for node_rank in new:
        host = spec.hosts_with_agents[node_rank]
        command = agent_command(spec, node_rank, lifeline=True)
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

    def signal_agents(signum: int) -> None:
        agents.order(names, signal_order(signum))

    return signal_agents


def _launch_openmpi(
    spec: LaunchSpec, runner: RunnerConfig, secret_names: Sequence[str], environment: Mapping[str, str], advice: str
) -> RunEnd:
    """Start a run with mpirun, and follow it. mpirun gets no signal that it does not pass on to the agents."""
    command = launcher_command(spec, runner, secret_names)
    assert command is not None
    agents = AgentProcesses()

    def signal_agents(signum: int) -> None:
        agents.signal(STOP_RANKS if signum in (signal.SIGTERM, signal.SIGINT) else signum)

    return Supervisor(spec, [command], signal_agents, advice, agents).run(environment)


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
    node_ranks: Sequence[int] | None = None,
) -> None:
    """Send secrets to every host through ssh's standard input, into a private file that the agent reads and removes.

    They never appear in a log, or on a command line, which every user of a host can read.

    Args:
        spec: The run.
        secrets: Values of the variables by name.
        environment: Variables of the ssh processes.
        ssh_port: Port of the ssh servers; None for ssh's own configuration.
        node_ranks: Numbers of the hosts; None for all.

    Raises:
        UnreachableHostError: A host does not answer.
        LaunchError: A host has not accepted them.
    """
    if node_ranks is None:
        node_ranks = range(len(spec.hosts))
    if not secrets or not node_ranks:
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

    with ThreadPoolExecutor(min(MAX_CONNECTIONS, len(node_ranks))) as pool:
        list(pool.map(send, node_ranks))
