"""Where a run's ranks go: hosts from the hostfile, from counts, or this machine's accelerators."""

from __future__ import annotations

import errno
import os
import random
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, fields

from neox.config.sections.runner import RunnerConfig
from neox.errors import LaunchError
from neox.launch.accelerators import visible_accelerators
from neox.launch.hosts import LOCAL_NAMES, check_host_name, read_hostfile, select_hosts
from neox.launch.spec import Host, SlotId

_RANKS_PER_CORE = 4
UNCOUNTED = "one CPU rank: no accelerator here, and neither num_gpus nor a hostfile is given"


@dataclass(frozen=True)
class Request:
    """What configuration and command line say about hosts; None and -1 mean "not said"."""

    hostfile: str | None = None
    include: str | None = None
    exclude: str | None = None
    num_nodes: int = -1
    num_gpus: int | None = None
    global_num_gpus: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    launcher: str = "pdsh"

    @staticmethod
    def of(runner: RunnerConfig) -> Request:
        """What a configuration says about hosts."""
        return Request(**{field.name: getattr(runner, field.name) for field in fields(Request)})


@dataclass(frozen=True)
class Placement:
    """hosts: the chosen hosts; why: in words, where the choice came from; accelerators: GPUs of this machine."""

    hosts: tuple[Host, ...]
    why: str
    accelerators: int

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return sum(len(host.slots) for host in self.hosts)

    @property
    def is_local(self) -> bool:
        """Whether every rank runs on this machine."""
        return len(self.hosts) == 1 and is_this_machine(self.hosts[0].name)


def is_this_machine(name: str) -> bool:
    """Whether a host's name means this machine; one remote host in a hostfile means that host."""
    return name in LOCAL_NAMES or name.partition(".")[0] == socket.gethostname().partition(".")[0]


def find_hostfile(request: Request, environment: Mapping[str, str] | None = None) -> str | None:
    """The hostfile that was asked for, by configuration or by `DLTS_HOSTFILE`."""
    if request.hostfile:
        return request.hostfile
    return (os.environ if environment is None else environment).get("DLTS_HOSTFILE") or None


def place(request: Request) -> Placement:
    """Choose hosts: the hostfile's slots; else slurm's allocation under `launcher: slurm`; else `global_num_gpus`;
    else `num_gpus`; else this machine's GPUs; else one CPU rank.

    Raises LaunchError where more is asked for than there is, or the hostfile cannot be read.
    """
    visible = visible_accelerators()
    path = find_hostfile(request)
    if path:
        hosts = select_hosts(
            read_hostfile(path),
            include=request.include,
            exclude=request.exclude,
            num_nodes=request.num_nodes,
            num_gpus=request.num_gpus,
        )
        placement = Placement(_with_local_devices(hosts, visible), f"hostfile {path}", len(visible))
        if request.global_num_gpus and request.global_num_gpus != placement.world_size:
            raise LaunchError(
                f"global_num_gpus is {request.global_num_gpus}, but the chosen hosts of {path} have "
                f"{placement.world_size} slots: take global_num_gpus out, or change the hostfile"
            )
        return placement
    if request.launcher == "slurm" and "SLURM_JOB_NODELIST" in os.environ:
        hosts = select_hosts(slurm_hosts(request.num_gpus), num_nodes=request.num_nodes)
        return Placement(hosts, "the slurm allocation", len(visible))
    if request.num_nodes > 1:
        raise LaunchError(f"num_nodes is {request.num_nodes}, which needs a hostfile (hostfile: PATH, or -H PATH)")
    if request.exclude or (request.include and "@" in request.include):
        raise LaunchError("include/exclude of hosts need a hostfile (hostfile: PATH, or -H PATH)")
    if request.include:
        count = len(visible) or 1024
        hosts = select_hosts([Host("localhost", tuple(range(count)))], include=request.include)
        return Placement(_with_local_devices(hosts, visible), "include", len(visible))
    ranks, why = _count(request, len(visible))
    return Placement(_with_local_devices((Host("localhost", tuple(range(ranks))),), visible), why, len(visible))


def slurm_hosts(num_gpus: int | None) -> tuple[Host, ...]:
    """The hosts of the slurm allocation that this process runs in, with `num_gpus` or the allocated GPUs each."""
    slots = num_gpus or int(os.environ.get("SLURM_GPUS_ON_NODE") or os.environ.get("SLURM_GPUS_PER_NODE") or 0)
    if not slots:
        raise LaunchError("slurm allocated no GPUs (SLURM_GPUS_ON_NODE): set num_gpus to the ranks on each host")
    command = ["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.split()
    except (OSError, subprocess.SubprocessError) as error:
        raise LaunchError(f"`{' '.join(command)}` failed ({error}): name the hosts in a hostfile") from None
    return tuple(Host(check_host_name(name, "SLURM_JOB_NODELIST"), tuple(range(slots))) for name in listed)


def _count(request: Request, accelerators: int) -> tuple[int, str]:
    if request.global_num_gpus:
        return request.global_num_gpus, "global_num_gpus"
    if request.num_gpus:
        return request.num_gpus, "num_gpus"
    if accelerators:
        return accelerators, "the accelerators of this machine"
    return 1, UNCOUNTED


def _with_local_devices(hosts: tuple[Host, ...], visible: tuple[SlotId, ...]) -> tuple[Host, ...]:
    """On this machine a slot is a position in CUDA_VISIBLE_DEVICES; without accelerators it is a CPU rank."""

    def devices(host: Host) -> Host:
        if not is_this_machine(host.name) or not visible:
            return host
        return Host(host.name, tuple(visible[s] if isinstance(s, int) and s < len(visible) else s for s in host.slots))

    return tuple(devices(host) for host in hosts)


def check_local_devices(placement: Placement) -> None:
    """Raise LaunchError when this machine has fewer accelerators, or far fewer cores, than ranks to start on it."""
    cores = os.cpu_count() or 1
    for host in placement.hosts:
        ranks = len(host.slots)
        if not is_this_machine(host.name):
            continue
        if 0 < placement.accelerators < ranks:
            raise LaunchError(
                f"{ranks} ranks on {host.name} ({placement.why}), which has {placement.accelerators} "
                "accelerators: lower num_gpus, or hide the accelerators with CUDA_VISIBLE_DEVICES= for CPU ranks"
            )
        if not placement.accelerators and ranks > max(8, _RANKS_PER_CORE * cores):
            raise LaunchError(
                f"{ranks} CPU ranks on {host.name} ({placement.why}), which has {cores} cores and no accelerator: "
                "name the hosts in a hostfile (-H PATH), or add --dry-run to see the plan"
            )


def master_address(placement: Placement, request: Request) -> str:
    """Address of the rendezvous: as asked, else the first host."""
    if request.master_addr:
        return check_host_name(request.master_addr, "master_addr")
    if placement.is_local:
        return "127.0.0.1"
    return placement.hosts[0].name.rpartition("@")[2]


def master_port_problem(placement: Placement, request: Request) -> str | None:
    """Why the port that was asked for cannot be used; None where it can, or is another machine's."""
    asked = request.master_port
    problem = _binding_problem(asked) if asked and is_this_machine(placement.hosts[0].name) else None
    if problem is None:
        return None
    return (
        f"master_port {asked} is taken ({problem}): another run on this machine? Leave master_port out for a free one"
    )


def master_port(placement: Placement, request: Request) -> int:
    """Port of the rendezvous: as asked, else one that is free here (on another machine: one that is likely free)."""
    here = is_this_machine(placement.hosts[0].name)
    if request.master_port:
        return request.master_port
    # Below the ports of outgoing connections, one of which could take a port until rank 0 listens; and at random, so
    # that runs that start together choose different ones.
    for _ in range(100):
        port = random.SystemRandom().randint(20000, 32000)
        if not here or (_binding_problem(port) is None and _reserve(port)):
            return port
    raise LaunchError("no free port between 20000 and 32000: set master_port")


def _binding_problem(port: int) -> str | None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            return error.strerror or str(error)
    return None


def _reserve(port: int) -> bool:
    """Keep other runs of ours off the port until this process ends; rank 0 listens on it seconds after it was chosen.

    What is held is a name in Linux' abstract namespace, which leaves the port itself to rank 0.
    """
    holder = socket.socket(socket.AF_UNIX)
    try:
        holder.bind(f"\0neox-master-port-{port}")
    except OSError as error:
        holder.close()
        return error.errno != errno.EADDRINUSE
    holder.detach()  # open as long as the process
    return True
