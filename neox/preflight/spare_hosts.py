"""Spare hosts of a placement: whether a run may use them."""

from __future__ import annotations

from dataclasses import replace

from neox.config import NeoXConfig
from neox.launch.hosts.hostfile import refusal
from neox.launch.hosts.placement import Placement


def with_spares(placement: Placement) -> Placement:
    """Return a placement whose hosts include the spare ones, so that all are checked."""
    return replace(placement, hosts=(*placement.hosts, *placement.spares), spares=())


def can_change_hosts(config: NeoXConfig, placement: Placement) -> bool:
    """Return whether the run may use other hosts than those of the placement.

    Raises:
        ConfigError: There are spare hosts, but the launcher cannot use them.
    """
    over_ssh = config.runner.launcher == "pdsh" and not config.runner.no_ssh_check
    if placement.spares and not over_ssh:
        raise refusal(
            "spare hosts need `launcher: pdsh` without no_ssh_check: remove them from the hostfile, or use pdsh",
            "launcher",
        )
    several = len(placement.hosts) > 1
    return not placement.assumed and (bool(placement.spares) or (several and config.healing.elastic))
