"""Command lines that start a run: the agent of one host, the launchers of many, and their printed form.

pdsh, srun and mpirun start one agent (`neox.launch.node`) per host, and the agent starts the ranks. Everything that a
shell reads is base64 or quoted. (DeepSpeed's own pdsh, slurm and MPI runners join unquoted strings for a shell, and
need mpi4py on every rank; with one agent per host all launchers share one supervision.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from shlex import join, quote

from neox.errors import LaunchError
from neox.launch.spec import Host, LaunchSpec

_MAX_ARGUMENT = 120_000  # characters; Linux refuses single arguments over 128 KiB, and a remote command is one
_MAX_SHOWN_WORD = 80
SSH_OPTIONS = (
    "-oBatchMode=yes",
    "-oConnectTimeout=6",
    "-oServerAliveInterval=5",  # a cut network is noticed after 30 seconds, as by the agents (`neox.launch.lifeline`)
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
        node_rank: Number of the host, from 0; "auto" where srun or mpirun sets it in the environment.
        lifeline: Whether the agent ends when its standard input ends.
        plain: Whether the agent prints for people, because no launcher process reads its events.
    """
    return [
        *module_command(spec, "neox.launch.node"),
        spec.encode(),
        f"--node_rank={node_rank}",
        *(["--lifeline"] if lifeline else []),
        *(["--plain"] if plain else []),
    ]


def module_command(spec: LaunchSpec, module: str) -> list[str]:
    """Return the start of a command that runs a module of this project on a host."""
    # The caller's own PYTHONPATH travels in the specification.
    return ["env", f"PYTHONPATH={spec.code_root}", spec.python, "-m", module]


def rank_command(spec: LaunchSpec) -> list[str]:
    """Return the command of every rank."""
    return [spec.python, "-u", "-m", "neox.launch.bootstrap", spec.script, *spec.arguments]


def deepspeed_command(spec: LaunchSpec, node_rank: int = 0) -> list[str]:
    """Return the command that starts a host's ranks under DeepSpeed's own launcher, without our supervision."""
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
    """Return the options of every ssh connection: it asks nothing, and notices a dead peer."""
    return [*SSH_OPTIONS, *([f"-p{ssh_port}"] if ssh_port else [])]


def ssh_command(host: Host, remote: Sequence[str], ssh_port: int | None, more_options: Sequence[str] = ()) -> list[str]:
    """Return the command that runs `remote` on one host over ssh."""
    return ["ssh", *more_options, *ssh_options(ssh_port), "--", host.name, join(remote)]


def pdsh_command(spec: LaunchSpec, remote: Sequence[str]) -> list[str]:
    """Return the command that runs `remote` on every host of a run.

    Args:
        spec: The run.
        remote: Words of the command; `{node}` at the end of a word becomes the host's number. pdsh replaces `%n` by
            the host's position in its list and `%h` by its name, so other percent signs are doubled.

    Raises:
        LaunchError: The command is longer than Linux accepts.
    """
    line = " ".join(quote(word).replace("%", "%%").replace("{node}", "%n") for word in remote)
    if len(line) > _MAX_ARGUMENT:
        raise LaunchError(
            f"the command for each host is {len(line):,} characters long, and Linux accepts {_MAX_ARGUMENT:,}: use "
            "`launcher: slurm`, or fewer variables in forward_environment"
        )
    names = ",".join(host.name for host in spec.hosts)
    return ["pdsh", "-S", "-R", "ssh", "-f", str(len(spec.hosts)), "-w", names, f"exec {line}"]


def pdsh_environment(environment: Mapping[str, str], ssh_port: int | None) -> dict[str, str]:
    """Return the environment of pdsh, which holds the options with which it calls ssh."""
    given = environment.get("PDSH_SSH_ARGS_APPEND", "")
    return {**environment, "PDSH_SSH_ARGS_APPEND": " ".join([*ssh_options(ssh_port), given]).strip()}


def pdsh_launch(spec: LaunchSpec) -> list[str]:
    """Return the command that starts every host's agent over ssh."""
    return pdsh_command(spec, agent_command(spec, "{node}", lifeline=True))


def pdsh_signal(spec: LaunchSpec, signum: int) -> list[str]:
    """Return the command that signals every host's agent over ssh."""
    return pdsh_command(
        spec, [*module_command(spec, "neox.launch.remote"), "signal", spec.run_id, "{node}", str(signum)]
    )


def slurm_command(spec: LaunchSpec, comment: str | None = None, account: str | None = None) -> list[str]:
    """Return the command that starts one agent per host with srun.

    Raises:
        LaunchError: The hosts differ in their number of slots; slurm distributes by count.
    """
    slots = _slots_per_host(spec, "slurm")
    return [
        "srun",
        f"--nodes={len(spec.hosts)}",
        f"--ntasks={len(spec.hosts)}",
        "--ntasks-per-node=1",
        f"--nodelist={','.join(host.name for host in spec.hosts)}",
        "--kill-on-bad-exit=1",
        f"--gpus-per-node={slots}",
        *([f"--comment={comment}"] if comment else []),
        *([f"--account={account}"] if account else []),
        "--export=ALL",
        *agent_command(spec, "auto", lifeline=False),
    ]


def openmpi_command(spec: LaunchSpec, inherited: Sequence[str] = ()) -> list[str]:
    """Return the command that starts one agent per host with Open MPI's mpirun.

    Args:
        spec: The run.
        inherited: Names of variables that mpirun forwards, without their values on the command line.
    """
    return [
        "mpirun",
        "-n",
        str(len(spec.hosts)),
        "--host",
        ",".join(host.name for host in spec.hosts),
        "--map-by",
        "ppr:1:node",
        *(word for name in inherited for word in ("-x", name)),
        *agent_command(spec, "auto", lifeline=False),
    ]


def _slots_per_host(spec: LaunchSpec, launcher: str) -> int:
    counts = {host.name: len(host.slots) for host in spec.hosts}
    if len(set(counts.values())) > 1:
        raise LaunchError(f"{launcher} needs as many slots on every host, but there are {counts}: set num_gpus")
    return len(spec.hosts[0].slots)


def host_commands(spec: LaunchSpec, launcher: str) -> list[HostCommand]:
    """Return for every host the line that starts its agent there.

    Lines differ in `--node_rank`; srun and mpirun run one line everywhere, whose agent reads its number from the
    environment.

    Args:
        spec: The run.
        launcher: `local`, `pdsh`, `slurm`, `openmpi` or `none`.
    """
    automatic = launcher in ("slurm", "openmpi")
    words = agent_command(
        spec, "auto" if automatic else 0, lifeline=launcher in ("local", "pdsh"), plain=launcher == "none"
    )
    position = next(index for index, word in enumerate(words) if word.startswith("--node_rank="))
    before, after = join(words[:position]), "".join(f" {quote(word)}" for word in words[position + 1 :])
    if launcher == "none":
        before = f"cd {quote(spec.directory)} && {before}"
    return [
        HostCommand(host.name, f"{before} --node_rank={'auto' if automatic else number}{after}")
        for number, host in enumerate(spec.hosts)
    ]


def printed_commands(spec: LaunchSpec, secrets: tuple[str, ...] = ()) -> list[str]:
    """Return what `launcher: none` prints: each host's command, ours (supervised) and torchrun's, with comments.

    Args:
        spec: The run.
        secrets: Names of variables that are forwarded but must not be written into a command.
    """
    lines = []
    if secrets:
        lines.append(f"# no secrets here: set {', '.join(secrets)} in the environment of these commands on each host")
    for line in host_commands(spec, "none"):
        lines += [f"# on {line.host}", line.command]
    if len({len(host.slots) for host in spec.hosts}) == 1:  # else torchrun cannot start them
        words = ["env", f"PYTHONPATH={spec.code_root}", *torchrun_command(spec)]
        lines += [
            "# or, under torchrun, with --node_rank counting up from 0: without our supervision, and without the locks",
            "# that keep other runs out of this run's directories",
            f"cd {quote(spec.directory)} && {join(words)}",
        ]
    return lines


def format_commands(spec: LaunchSpec, launcher: str) -> list[str]:
    """Return lines for people: the first host's command, how the others differ, and what it starts; long words cut."""
    lines = host_commands(spec, launcher)
    text = [f"on {lines[0].host}: {_cut(lines[0].command)}"]
    if more := len(lines) - 1:
        same = f"on {more} more host{'s' * (more > 1)} the same"
        number = "" if lines[0].command == lines[1].command else " with --node_rank 1" + f" to {more}" * (more > 1)
        text.append(same + number)
    slots = len(spec.hosts[0].slots)
    text.append(f"which starts, {slots} time{'s' * (slots > 1)}: {_cut(join(rank_command(spec)))}")
    text.append("(long words are cut here; --json has every host's command whole)")
    return text


def _cut(command: str) -> str:
    words = command.split(" ")
    return " ".join(
        word if len(word) <= _MAX_SHOWN_WORD else f"{word[:32]}...({len(word):,} characters)" for word in words
    )
