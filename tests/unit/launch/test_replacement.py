"""Which hosts a start uses when some cannot take part."""

from __future__ import annotations

import pytest

from neox.launch import Host
from neox.launch.hosts.replacement import choose_fit_hosts, most_usable_hosts

HOSTS = tuple(Host(name, (0, 1)) for name in "abc")
SPARES = (Host("small", (0,), spare=True), Host("large", (0, 1, 2), spare=True))


def test_a_spare_host_takes_the_place_of_an_unfit_one() -> None:
    chosen = choose_fit_hosts(HOSTS, SPARES, {"b": "no answer"})
    assert [(host.name, host.slots) for host in chosen.hosts] == [("a", (0, 1)), ("large", (0, 1)), ("c", (0, 1))]
    assert chosen.replaced == {"b": "large"}
    assert chosen.missing == ()


def test_spare_hosts_that_are_unfit_too_small_or_taken_replace_nothing() -> None:
    assert [host.name for host in choose_fit_hosts(HOSTS, SPARES, {"a": "", "b": ""}).missing] == ["b"]
    chosen = choose_fit_hosts(HOSTS, SPARES, {"c": "", "large": ""})
    assert [host.name for host in chosen.hosts] == ["a", "b"]
    assert chosen.missing == (HOSTS[2],)


@pytest.mark.parametrize(
    ("hosts", "ranks_of_copy", "samples", "batch", "used"),
    [
        (2, 1, 1, 12, 2),  # 4 data ranks x 3 micro batches
        (2, 1, 2, 12, 1),  # 4 ranks x 2 samples do not divide 12; 2 ranks do
        (2, 4, 1, 6, 2),  # one copy of the network on both hosts
        (1, 4, 1, 6, 0),  # too few ranks for a copy
        (2, 1, 5, 12, 0),
    ],
)
def test_as_many_hosts_as_can_share_the_batch(
    hosts: int, ranks_of_copy: int, samples: int, batch: int, used: int
) -> None:
    assert most_usable_hosts(HOSTS[:hosts], ranks_of_copy, samples, (batch,)) == HOSTS[:used]


def test_hosts_share_every_batch() -> None:
    assert most_usable_hosts(HOSTS, 1, 1, (24,)) == HOSTS
    assert most_usable_hosts(HOSTS, 1, 1, (24, 8)) == HOSTS[:2]
    assert most_usable_hosts(HOSTS, 1, 1, (24, 5)) == ()
