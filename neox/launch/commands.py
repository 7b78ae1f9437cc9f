"""Command lines that start a run: the agent of one host, and what starts one agent on every host.

Everything that passes a shell is base64 or quoted. pdsh, srun and mpirun start one agent (`neox.launch.node`) per host;
the agent starts DeepSpeed's launcher there. (DeepSpeed's own pdsh, slurm and mpi runners join strings for a shell, and
need mpi4py on every rank; behind the agent all launchers share one supervision.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from shlex import join, quote

from neox.errors import LaunchError
from neox.launch.spec import Host, LaunchSpec

_LONGEST_ARGUMENT = 120_000  # Linux refuses single arguments over 128 KiB; a remote command is one
SSH_OPTIONS = (
    "-oBatchMode=yes",
    "-oConnectTimeout=6",
    "-oServerAliveInterval=5",  # a cut network is noticed after 30 seconds, as by the agents (`neox.launch.connection`)
    "-oServerAliveCountMax=5",
)


def deepspeed_launch(spec: LaunchSpec, node_rank: int) -> list[str]:
    """The start of DeepSpeed's per-host launcher for one host."""
    return [
        spec.python,
        "-m",
        "deepspeed.launcher.launch",
        f"--world_info={spec.world_info}",
        f"--node_rank={node_rank}",
        f"--master_addr={spec.master_addr}",
        f"--master_port={spec.master_port}",
        "--log_level=warning",
        "--no_local_rank",
    ]


def agent_command(spec: LaunchSpec, node_rank: int | str, *, lifeline: bool, plain: bool = False) -> list[str]:
    """The command that runs the agent of one host, on that host; `plain` where no head process listens."""
    return [
        "env",
        f"PYTHONPATH={spec.code_root}",  # the caller's own PYTHONPATH travels in the specification
        spec.python,
        "-m",
        "neox.launch.node",
        spec.encode(),
        f"--node_rank={node_rank}",
        *(["--lifeline"] if lifeline else []),
        *(["--plain"] if plain else []),
    ]


def ssh_options(ssh_port: int | None) -> list[str]:
    """Options for every ssh connection: no questions, and a dead peer is noticed."""
    return [*SSH_OPTIONS, *([f"-p{ssh_port}"] if ssh_port else [])]


def pdsh_command(spec: LaunchSpec, remote: Sequence[str]) -> list[str]:
    """Run a command on every host of a run; an argument `{node}` at the end of a word becomes the host's number.

    pdsh replaces `%n` by the host's position in its list and `%h` by its name, so other percent signs are doubled.
    """
    line = " ".join(quote(word).replace("%", "%%").replace("{node}", "%n") for word in remote)
    if len(line) > _LONGEST_ARGUMENT:
        raise LaunchError(
            f"the command for each host is {len(line):,} characters long, over what Linux passes on: use "
            "`launcher: slurm`, or fewer variables in forward_environment"
        )
    names = ",".join(host.name for host in spec.hosts)
    return ["pdsh", "-S", "-R", "ssh", "-f", str(len(spec.hosts)), "-w", names, f"exec {line}"]


def pdsh_environment(environment: Mapping[str, str], ssh_port: int | None) -> dict[str, str]:
    """pdsh's own environment: how it calls ssh."""
    given = environment.get("PDSH_SSH_ARGS_APPEND", "")
    return {**environment, "PDSH_SSH_ARGS_APPEND": " ".join([*ssh_options(ssh_port), given]).strip()}


def pdsh_launch(spec: LaunchSpec) -> list[str]:
    """Start every host's agent over ssh."""
    return pdsh_command(spec, agent_command(spec, "{node}", lifeline=True))


def pdsh_signal(spec: LaunchSpec, signum: int) -> list[str]:
    """Signal every host's agent over ssh."""
    words = ["env", f"PYTHONPATH={spec.code_root}", spec.python, "-m", "neox.launch.control", spec.run_id]
    return pdsh_command(spec, [*words, "{node}", str(signum)])


def ssh_command(host: Host, remote: Sequence[str], ssh_port: int | None) -> list[str]:
    """Run a command on one host."""
    return ["ssh", *ssh_options(ssh_port), "--", host.name, join(remote)]


def slurm_command(spec: LaunchSpec, comment: str | None = None, account: str | None = None) -> list[str]:
    """Start one agent per host with srun; slurm places ranks by count, so every host must have as many."""
    slots = _equal_slots(spec, "slurm")
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
    """Start one agent per host with Open MPI's mpirun; it carries the variables named in `inherited`, out of sight."""
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


def torchrun_command(spec: LaunchSpec, node_rank: int) -> list[str]:
    """The same ranks under torchrun, without our supervision, for schedulers that bring their own."""
    slots = _equal_slots(spec, "torchrun")
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


def _equal_slots(spec: LaunchSpec, launcher: str) -> int:
    counts = {host.name: len(host.slots) for host in spec.hosts}
    if len(set(counts.values())) > 1:
        raise LaunchError(f"{launcher} needs as many slots on every host, but there are {counts}: set num_gpus")
    return len(spec.hosts[0].slots)
