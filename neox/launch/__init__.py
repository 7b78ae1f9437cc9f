"""Turning a plan into processes: hosts, commands, supervision. No torch here, and DeepSpeed only by command name.

Names are loaded when first used: agents and keepers, which start on every host, need no configuration.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from neox.launch.accelerators import count_accelerators
    from neox.launch.environment import child_environment, forwarded_environment
    from neox.launch.hosts import read_hostfile, select_hosts
    from neox.launch.placement import Placement, Request, place
    from neox.launch.rendezvous import acknowledge_stop, busy_saving, report_progress
    from neox.launch.spec import Host, LaunchSpec
    from neox.launch.supervise import Supervisor

_HOMES = {
    "Host": "spec",
    "LaunchSpec": "spec",
    "Placement": "placement",
    "Request": "placement",
    "Supervisor": "supervise",
    "acknowledge_stop": "rendezvous",
    "busy_saving": "rendezvous",
    "child_environment": "environment",
    "count_accelerators": "accelerators",
    "forwarded_environment": "environment",
    "place": "placement",
    "read_hostfile": "hosts",
    "report_progress": "rendezvous",
    "select_hosts": "hosts",
}

__all__ = [
    "Host",
    "LaunchSpec",
    "Placement",
    "Request",
    "Supervisor",
    "acknowledge_stop",
    "busy_saving",
    "child_environment",
    "count_accelerators",
    "forwarded_environment",
    "place",
    "read_hostfile",
    "report_progress",
    "select_hosts",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
