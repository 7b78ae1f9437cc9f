"""Summary of what a run does after failures, for the plan that `--dry-run` prints."""

from __future__ import annotations

from collections.abc import Iterator

from neox.config import NeoXConfig
from neox.features.on_paper import PAPERS
from neox.launch.hosts.placement import Placement


def recovery_lines(config: NeoXConfig, placement: Placement) -> Iterator[str]:
    """Yield one line for each kind of recovery that is configured; none if a failure simply ends the run.

    Args:
        config: The configuration.
        placement: Hosts and spare hosts.
    """
    keys = config.healing
    if keys.max_restarts:
        yield f"restarts from the newest checkpoint, at most {keys.max_restarts}"
    if placement.spares:
        names = ", ".join(f"{host.name} ({len(host.slots)} slots)" for host in placement.spares)
        yield f"spare hosts: {names}"
    if keys.elastic:
        yield "fewer data ranks if hosts are missing (elastic)"
    for paper in PAPERS:
        yield from paper.recovery_lines(config)
    if keys.preemption_command is not None or keys.preemption_file is not None:
        yield f"preemption notices looked for every {keys.preemption_seconds:g} s"
