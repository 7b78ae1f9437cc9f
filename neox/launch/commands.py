"""Command lines that start a run: the agent of one host, the launchers of many, and their printed form.

pdsh, srun and mpirun start one agent (`neox.launch.agent.host_agent`) per host, and the agent starts the ranks. So the
ranks are supervised in the same way under all launchers. Everything that a shell reads is base64 or quoted.
(DeepSpeed's own pdsh, slurm and MPI runners join unquoted strings for a shell, and need mpi4py on every rank.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from shlex import join, quote, split

from neox.errors import LaunchError
from neox.launch.hosts.hostfile import is_this_machine
from neox.launch.hosts.machine import visible_accelerators
from neox.launch.hosts.vendors import devices_of_slots
from neox.launch.spec import Host, LaunchSpec, SlotId

_MAX_ARGUMENT = 120_000  # characters; a remote command is a single argument, and Linux refuses those over 128 KiB
_MAX_SHOWN_WORD = 80
MAX_CONNECTIONS = 128
"""Number of hosts to which this machine opens ssh connections at the same time."""
SSH_FAILED = 255
"""Exit status of ssh if it could not connect, or lost the connection."""
SSH_OPTIONS = (
    "-oBatchMode=yes",
    "-oConnectTimeout=6",
    # Notice a cut network after 30 seconds, as the agents do (`neox.launch.agent.lifeline`).
    "-oServerAliveInterval=5",
    "-oServerAliveCountMax=5",
)


@dataclass(frozen=True)
class HostCommand:
    """A shell line that runs on a host."""

    host: str
    command: str


def agent_command(spec: LaunchSpec, node_rank: int | str, *, lifeline: bool, plain: bool = False) -> list[str]:
    """Return the command that runs the agent of one host, on that host.

    Args:
        spec: The run.
        node_rank: Number of the host, from 0; "auto" if srun or mpirun sets it in the environment.
        lifeline: Whether the agent ends when its standard input ends.
        plain: Whether the agent prints for people, because no launcher process reads its events.
    """
    command = [*module_command(spec, "neox.launch.agent.host_agent"), spec.encode()]
    if lifeline:
        command.append("--lifeline")
    if plain:
        command.append("--plain")
    return [*command, f"--node_rank={node_rank}"]


def module_command(spec: LaunchSpec, module: str) -> list[str]:
    """Return the start of a command that runs a module of this project on a host."""
    # The caller's own PYTHONPATH travels in the specification.
    return ["env", f"PYTHONPATH={spec.code_root}", spec.python, "-m", module]


def rank_command(spec: LaunchSpec) -> list[str]:
    """Return the command of every rank."""
    return [spec.python, "-u", "-m", "neox.launch.agent.bootstrap", spec.script, *spec.arguments]


def warm_command(spec: LaunchSpec) -> list[str] | None:
    """Return the command of a process that becomes a rank later; None if the run has none."""
    if spec.warm_module is None:
        return None
    return [spec.python, "-u", "-m", "neox.launch.agent.bootstrap", "--warm", spec.warm_module]


def deepspeed_command(spec: LaunchSpec, node_rank: int = 0) -> list[str]:
    """Return the command that starts a host's ranks under DeepSpeed's own launcher, without our supervision."""
    hosts = []
    for host in spec.hosts:
        slots: tuple[SlotId, ...] | None = None
        if is_this_machine(host.name):  # that launcher takes slots for devices, whatever the host shows
            slots = devices_of_slots(host.slots, visible_accelerators())
        hosts.append(replace(host, slots=slots or host.slots))
    spec = replace(spec, hosts=tuple(hosts))
    return [
        spec.python,
        "-m",
        "deepspeed.launcher.launch",
        f"--world_info={spec.world_info}",
        f"--node_rank={node_rank}",
        f"--master_addr={spec.master_addr}",
        f"--master_port={spec.master_port}",
        "--no_local_rank",
        spec.script,
        *spec.arguments,
    ]


def torchrun_command(spec: LaunchSpec, node_rank: int = 0) -> list[str]:
    """Return the command that starts a host's ranks under torchrun, without our supervision.

    Raises:
        LaunchError: The hosts differ in their number of slots.
    """
    slots = _slots_per_host(spec, "torchrun")
    return [
        spec.python,
        "-m",
        "torch.distributed.run",
        f"--nnodes={len(spec.hosts)}",
        f"--node_rank={node_rank}",
        f"--nproc_per_node={slots}",
        f"--master_addr={spec.master_addr}",
        f"--master_port={spec.master_port}",
        spec.script,
        *spec.arguments,
    ]


def ssh_options(ssh_port: int | None) -> list[str]:
    """Return the options for all ssh connections: ask no questions, and notice if the other host is gone."""
    options = list(SSH_OPTIONS)
    if ssh_port:
        options.append(f"-p{ssh_port}")
    return options


def more_ssh_options(environment: Mapping[str, str]) -> list[str]:
    """Return the user's options for all ssh connections, which are in a variable that pdsh reads, too."""
    return split(environment.get("PDSH_SSH_ARGS_APPEND", ""))


def ssh_command(host: Host, remote: Sequence[str], ssh_port: int | None, more_options: Sequence[str] = ()) -> list[str]:
    """Return the command that runs `remote` on one host over ssh."""
    return ["ssh", *more_options, *ssh_options(ssh_port), "--", host.name, join(remote)]


def pdsh_command(spec: LaunchSpec, remote: Sequence[str]) -> list[str]:
    """Return the command that runs `remote` on every host of a run.

    Args:
        spec: The run.
        remote: Words of the command; `{node}` in a word becomes the host's number.

    Raises:
        LaunchError: The command is longer than Linux accepts.
    """
    # pdsh replaces `%n` by the host's position in its list and `%h` by its name. Other percent signs are doubled.
    words = [quote(word).replace("%", "%%").replace("{node}", "%n") for word in remote]
    line = " ".join(words)
    check_length(line)
    names = ",".join(spec.host_names)
    return ["pdsh", "-S", "-R", "ssh", "-f", str(len(spec.hosts)), "-w", names, f"exec {line}"]


def check_length(line: str) -> None:
    """Refuse the line of a remote command if it is longer than Linux accepts. Raises LaunchError."""
    if len(line) > _MAX_ARGUMENT:
        raise LaunchError(
            f"the command for each host is {len(line):,} characters long, and Linux accepts {_MAX_ARGUMENT:,}: use "
            "`launcher: slurm`, or fewer variables in forward_environment"
        )


def pdsh_environment(environment: Mapping[str, str], ssh_port: int | None) -> dict[str, str]:
    """Return the environment for pdsh, with the options for ssh added."""
    options = ssh_options(ssh_port)
    given = environment.get("PDSH_SSH_ARGS_APPEND")
    if given:
        options.append(given)
    return {**environment, "PDSH_SSH_ARGS_APPEND": " ".join(options)}


def pdsh_launch(spec: LaunchSpec) -> list[str]:
    """Return the command that starts every host's agent over ssh."""
    return pdsh_command(spec, agent_command(spec, "{node}", lifeline=True))


def pdsh_signal(spec: LaunchSpec, signum: int) -> list[str]:
    """Return the command that signals every host's agent over ssh."""
    command = [*module_command(spec, "neox.launch.hosts.remote"), "signal", spec.run_id, "{node}", str(signum)]
    return pdsh_command(spec, command)


def slurm_command(
    spec: LaunchSpec,
    comment: str | None = None,
    account: str | None = None,
    *,
    gpus: bool = True,
    more: Sequence[str] = (),
) -> list[str]:
    """Return the command that starts one agent per host with srun.

    Args:
        spec: The run.
        comment: Comment of the job step.
        account: Account of the job step.
        gpus: Whether to ask for a GPU for each slot. A cluster without GPUs, or one where slurm does not know of them,
            refuses that.
        more: Further arguments of srun.

    Raises:
        LaunchError: The hosts differ in their number of slots; slurm gives every host the same number.
    """
    slots = _slots_per_host(spec, "slurm")
    command = [
        "srun",
        f"--nodes={len(spec.hosts)}",
        f"--ntasks={len(spec.hosts)}",
        "--ntasks-per-node=1",
        "--nodelist=" + ",".join(spec.host_names),
        "--kill-on-bad-exit=1",
        "--input=all",  # orders to the agents
    ]
    if gpus:
        command.append(f"--gpus-per-node={slots}")
    if comment:
        command.append(f"--comment={comment}")
    if account:
        command.append(f"--account={account}")
    command += [*more, "--export=ALL"]
    return command + agent_command(spec, "auto", lifeline=True)


def openmpi_command(spec: LaunchSpec, inherited: Sequence[str] = (), more: Sequence[str] = ()) -> list[str]:
    """Return the command that starts one agent per host with Open MPI's mpirun.

    Args:
        spec: The run.
        inherited: Names of variables that mpirun forwards, without their values on the command line.
        more: Further arguments of mpirun.
    """
    command = ["mpirun", "-n", str(len(spec.hosts)), "--host", ",".join(spec.host_names), "--map-by", "ppr:1:node"]
    for name in inherited:
        command += ["-x", name]
    return command + list(more) + agent_command(spec, "auto", lifeline=False)


def _slots_per_host(spec: LaunchSpec, launcher: str) -> int:
    """Return the number of slots of every host. Raises LaunchError if the hosts differ."""
    counts = {host.name: len(host.slots) for host in spec.hosts}
    if len(set(counts.values())) > 1:
        raise LaunchError(f"{launcher} needs the same number of slots on every host, not {counts}: set num_gpus")
    return len(spec.hosts[0].slots)


def host_commands(spec: LaunchSpec, launcher: str) -> list[HostCommand]:
    """Return for every host the line that starts its agent there.

    The lines differ only in `--node_rank`. srun and mpirun run the same line on every host: `--node_rank=auto`.

    Args:
        spec: The run.
        launcher: `local`, `pdsh`, `slurm`, `openmpi` or `none`.
    """
    is_numbered_by_launcher = launcher in ("slurm", "openmpi")
    lifeline = launcher in ("local", "pdsh", "slurm")
    # The specification in the command is long, so it is encoded and quoted only once.
    *words, _node_rank = agent_command(spec, 0, lifeline=lifeline, plain=launcher == "none")
    before = join(words)
    if launcher == "none":
        before = f"cd {quote(spec.directory)} && {before}"
    commands = []
    for number, host in enumerate(spec.hosts):
        node_rank = "auto" if is_numbered_by_launcher else number
        commands.append(HostCommand(host.name, f"{before} --node_rank={node_rank}"))
    return commands


def printed_commands(spec: LaunchSpec, secrets: tuple[str, ...] = ()) -> list[str]:
    """Return the lines that `launcher: none` prints: the command for each host, then another one for torchrun.

    Args:
        spec: The run.
        secrets: Names of variables that are forwarded but must not be written into a command.
    """
    lines = []
    if secrets:
        lines.append(f"# no secrets here: set {', '.join(secrets)} in the environment of these commands on each host")
    for on_host in host_commands(spec, "none"):
        lines += [f"# on {on_host.host}", on_host.command]
    slot_counts = {len(host.slots) for host in spec.hosts}
    if len(slot_counts) == 1:  # torchrun needs the same number of slots on every host
        words = ["env", f"PYTHONPATH={spec.code_root}", *torchrun_command(spec)]
        lines += [
            "# or with torchrun, and --node_rank 0, 1, ... on the hosts. Then nothing supervises the ranks, or",
            "# keeps other runs out of this run's directories",
            f"cd {quote(spec.directory)} && {join(words)}",
        ]
    return lines


def format_commands(spec: LaunchSpec, launcher: str) -> list[str]:
    """Return lines for people: the command on the first host, how it differs on the others, and the ranks' command."""
    lines = host_commands(spec, launcher)
    text = [f"on {lines[0].host}: {_cut_long_words(lines[0].command)}"]
    last = len(lines) - 1
    if last > 0:
        hosts = "1 more host" if last == 1 else f"{last} more hosts"
        text.append(f"on {hosts} the same")
        if lines[0].command != lines[1].command:
            text[-1] += " with --node_rank 1" if last == 1 else f" with --node_rank 1 to {last}"
    slots = len(spec.hosts[0].slots)
    times = "1 time" if slots == 1 else f"{slots} times"
    text.append(f"which starts, {times}: {_cut_long_words(join(rank_command(spec)))}")
    text.append("(long words are cut here; --json has every host's command whole)")
    return text


def _cut_long_words(command: str) -> str:
    words = command.split(" ")
    for number, word in enumerate(words):
        if len(word) > _MAX_SHOWN_WORD:
            words[number] = f"{word[:32]}...({len(word):,} characters)"
    return " ".join(words)
