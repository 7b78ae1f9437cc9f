"""Ranks and stages of hosts, grouped for people."""

from __future__ import annotations

from neox.config import Topology
from neox.launch.host_groups import host_groups, ranks_of_hosts
from neox.launch.spec import Host


def hosts(*slots: int) -> list[Host]:
    return [Host(f"h{i}", tuple(range(count))) for i, count in enumerate(slots)]


def test_hosts_that_are_alike_are_one_group() -> None:
    groups = host_groups(Topology(2, 4, 2), hosts(4, 4, 4, 4))
    assert [str(group) for group in groups] == [
        "h0 to h1 (2 hosts): 4 slots each, ranks 0-7, stage 0",
        "h2 to h3 (2 hosts): 4 slots each, ranks 8-15, stage 1",
    ]


def test_a_host_may_hold_several_stages_and_hosts_may_differ() -> None:
    groups = host_groups(Topology(4, 1, 1), hosts(3, 1))
    assert [(group.ranks, group.stages) for group in groups] == [((0, 2), (0, 2)), ((3, 3), (3, 3))]
    assert str(groups[1]) == "h1: 1 slot, rank 3, stage 3"
    assert [group.names for group in ranks_of_hosts(Topology(1, 2, 1), hosts(1, 1))] == [("h0",), ("h1",)]
