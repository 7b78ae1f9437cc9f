"""Turning a plan into processes: hosts, commands, supervision. No torch here, and DeepSpeed only by command name."""

from neox.launch.accelerators import count_accelerators
from neox.launch.environment import child_environment, forwarded_environment
from neox.launch.hosts import read_hostfile, select_hosts
from neox.launch.placement import Placement, Request, place
from neox.launch.rendezvous import acknowledge_stop, report_progress
from neox.launch.spec import Host, LaunchSpec
from neox.launch.supervise import Supervisor

__all__ = [
    "Host",
    "LaunchSpec",
    "Placement",
    "Request",
    "Supervisor",
    "acknowledge_stop",
    "child_environment",
    "count_accelerators",
    "forwarded_environment",
    "place",
    "read_hostfile",
    "report_progress",
    "select_hosts",
]
