"""Hosts with their ranks and pipeline stages, and groups of hosts that are alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from neox.launch.spec import Host
from neox.plan.ranks.topology import Topology


@dataclass(frozen=True)
class HostGroup:
    """Consecutive hosts with the same number of slots and the same stages.

    Attributes:
        names: Names of the hosts.
        slots: Number of slots of each host.
        ranks: First and last rank.
        stages: First and last pipeline stage.
    """

    names: tuple[str, ...]
    slots: int
    ranks: tuple[int, int]
    stages: tuple[int, int]

    def __str__(self) -> str:
        hosts = self.names[0]
        slots = "1 slot" if self.slots == 1 else f"{self.slots} slots"
        if len(self.names) > 1:
            hosts += f" to {self.names[-1]} ({len(self.names)} hosts)"
            slots += " each"
        return f"{hosts}: {slots}, {_span('rank', self.ranks)}, {_span('stage', self.stages)}"


def ranks_of_hosts(grid: Topology, hosts: Sequence[Host]) -> Iterator[HostGroup]:
    """Yield each host with its ranks and stages, as a group of one host."""
    ranks_per_stage = grid.dp_size * grid.tp_size
    first = 0
    for host in hosts:
        last = first + len(host.slots) - 1
        stages = (first // ranks_per_stage, last // ranks_per_stage)
        yield HostGroup((host.name,), len(host.slots), (first, last), stages)
        first = last + 1


def host_groups(grid: Topology, hosts: Sequence[Host]) -> list[HostGroup]:
    """Group consecutive hosts with the same number of slots and the same stages."""
    groups: list[HostGroup] = []
    for host in ranks_of_hosts(grid, hosts):
        before = groups[-1] if groups else None
        if before is not None and before.slots == host.slots and before.stages == host.stages:
            groups[-1] = replace(before, names=before.names + host.names, ranks=(before.ranks[0], host.ranks[1]))
        else:
            groups.append(host)
    return groups


def _span(word: str, bounds: tuple[int, int]) -> str:
    """Return numbers from the first to the last, as `rank 3` or `ranks 0-7`."""
    first, last = bounds
    if first == last:
        return f"{word} {first}"
    return f"{word}s {first}-{last}"
