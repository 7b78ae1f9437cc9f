"""Address and port at which the ranks of a run meet: those that are configured, or those of the first host."""

from __future__ import annotations

import errno
import random
import socket

from neox.config.sections.runner import RunnerConfig
from neox.errors import LaunchError
from neox.launch.hosts.hostfile import check_host_name, is_loopback, is_this_machine, sending_address
from neox.launch.hosts.machine import port_problem
from neox.launch.hosts.placement import Placement

# Below the ports of outgoing connections: one of these could take the port before rank 0 listens on it.
_FIRST_PORT = 20000
_LAST_PORT = 32000
_ATTEMPTS = 100


def master_address(placement: Placement, runner: RunnerConfig) -> str:
    """Return the address of the rendezvous: `master_addr`, else the first host's.

    Other hosts cannot reach a first host that the hostfile calls `localhost`. Then it is the address from which this
    machine sends to the second one.
    """
    if runner.master_addr:
        return check_host_name(runner.master_addr, "master_addr")
    if placement.is_local:
        return "127.0.0.1"
    first, *others = (host.name.rpartition("@")[2] for host in placement.hosts)
    if others and is_loopback(first):
        return sending_address(others[0]) or socket.gethostname()
    return first


def master_port_problem(placement: Placement, runner: RunnerConfig) -> str | None:
    """Return why `master_port` cannot be used; None if it can, or if the port is on another machine."""
    port = runner.master_port
    if not port or not is_this_machine(placement.hosts[0].name):
        return None
    problem = port_problem(port)
    if problem is None:
        return None
    return f"master_port {port} is taken ({problem}): another run on this machine? Remove master_port for a free one"


def master_port(placement: Placement, runner: RunnerConfig) -> int:
    """Return the port of the rendezvous: `master_port`, else a free one, or one of another machine that is likely free.

    Raises:
        LaunchError: No port is free.
    """
    if runner.master_port:
        return runner.master_port
    here = is_this_machine(placement.hosts[0].name)
    random_numbers = random.SystemRandom()  # so that runs that start together choose different ports
    for _ in range(_ATTEMPTS):
        port = random_numbers.randint(_FIRST_PORT, _LAST_PORT)
        if not here:
            return port
        if port_problem(port) is None and _reserve_port(port):
            return port
    raise LaunchError(f"no free port between {_FIRST_PORT} and {_LAST_PORT}: set master_port")


def _reserve_port(port: int) -> bool:
    """Keep other runs of this program off a port until this process ends. Rank 0 listens on it seconds later.

    The reservation is a name in Linux' abstract socket namespace, so the port itself stays free for rank 0.

    Returns:
        Whether the port is reserved for this process; also True if the system cannot say.
    """
    holder = socket.socket(socket.AF_UNIX)
    try:
        holder.bind(f"\0neox-master-port-{port}")
    except OSError as error:
        holder.close()
        return error.errno != errno.EADDRINUSE
    holder.detach()  # stays open until the process ends
    return True
