"""Which ranks and pipeline stages each host gets, for people: neighbours that are alike are one group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from neox.config.plan import Topology
from neox.launch.spec import Host


@dataclass(frozen=True)
class HostGroup:
    """Hosts in a row with equal slots and stages; ranks and stages are first and last."""

    names: tuple[str, ...]
    slots: int
    ranks: tuple[int, int]
    stages: tuple[int, int]

    def __str__(self) -> str:
        hosts = (
            self.names[0] if len(self.names) == 1 else f"{self.names[0]} to {self.names[-1]} ({len(self.names)} hosts)"
        )
        slots = "1 slot" if self.slots == 1 else f"{self.slots} slots"
        slots += " each" if len(self.names) > 1 else ""
        return f"{hosts}: {slots}, {_span('rank', self.ranks)}, {_span('stage', self.stages)}"


def ranks_of_hosts(grid: Topology, hosts: Sequence[Host]) -> Iterator[HostGroup]:
    """Yield each host by itself. Ranks are counted through the hosts in order, pipeline stages outermost."""
    per_stage, first = grid.dp_size * grid.tp_size, 0
    for host in hosts:
        last = first + len(host.slots) - 1
        yield HostGroup((host.name,), len(host.slots), (first, last), (first // per_stage, last // per_stage))
        first = last + 1


def host_groups(grid: Topology, hosts: Sequence[Host]) -> list[HostGroup]:
    """Return hosts in a row with equal slots and stages as one."""
    groups: list[HostGroup] = []
    for host in ranks_of_hosts(grid, hosts):
        before = groups[-1] if groups else None
        if before is not None and (before.slots, before.stages) == (host.slots, host.stages):
            groups[-1] = HostGroup(
                (*before.names, *host.names), host.slots, (before.ranks[0], host.ranks[1]), host.stages
            )
        else:
            groups.append(host)
    return groups


def _span(word: str, ends: tuple[int, int]) -> str:
    return f"{word} {ends[0]}" if ends[0] == ends[1] else f"{word}s {ends[0]}-{ends[1]}"
