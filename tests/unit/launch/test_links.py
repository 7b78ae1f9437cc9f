"""Which host is at fault if links between hosts are slow or broken, and the transfers themselves."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from neox.launch.hosts.links import Link, LinkMeasurement, LinkResult, address_of, measure_links

ROOT = Path(__file__).resolve().parents[3]
USUAL = 1e8


class Network(LinkMeasurement):
    """Links of given speeds; all others have the usual one."""

    def __init__(self, speeds: Mapping[Link, float | str]) -> None:
        self.speeds = speeds
        self.sent: list[Link] = []

    def send(self, links: Sequence[Link]) -> dict[Link, float | str]:
        assert len({sender for sender, _ in links}) == len(links)
        self.sent += links
        return {link: self.speeds.get(link, USUAL) for link in links}


def measure(hosts: int, speeds: Mapping[Link, float | str]) -> tuple[list[LinkResult], list[Link]]:
    network = Network(speeds)
    return measure_links([f"host{number}" for number in range(hosts)], network), network.sent


def around(host: int, hosts: int, result: float | str, direction: str = "both") -> dict[Link, float | str]:
    """The links of one host."""
    found: dict[Link, float | str] = {}
    for other in range(hosts):
        if direction != "receives":
            found[host, other] = result
        if direction != "sends":
            found[other, host] = result
    return found


@pytest.mark.parametrize("hosts", [2, 3, 4, 9])
@pytest.mark.parametrize("result", [0.2 * USUAL, "timed out"])
@pytest.mark.parametrize("direction", ["sends", "receives", "both"])
def test_the_host_with_a_bad_link_is_found(hosts: int, result: float | str, direction: str) -> None:
    if hosts == 2 and direction == "both" and isinstance(result, float):
        pytest.skip("two hosts whose links are equally slow in both directions: that is their speed")
    for bad in range(1 if hosts == 2 else 0, hosts):
        found, _ = measure(hosts, around(bad, hosts, result, direction))
        assert [number for number, host in enumerate(found) if host.problem] == [bad]
        if hosts > 2:
            assert all(host.speed == USUAL for number, host in enumerate(found) if number != bad)


class BusyNetwork(Network):
    """Links of which the given ones are slow in the first transfers only."""

    def send(self, links: Sequence[Link]) -> dict[Link, float | str]:
        results = super().send(links)
        if len(self.sent) > 8:
            return dict.fromkeys(links, USUAL)
        return results


def test_a_host_that_is_busy_for_a_moment_is_not_at_fault() -> None:
    network = BusyNetwork(around(1, 4, 0.1 * USUAL))
    results = measure_links([f"host{number}" for number in range(4)], network)
    assert len(network.sent) > 8
    assert not any(result.problem for result in results)


def test_good_links_are_measured_once() -> None:
    found, sent = measure(5, {(0, 1): 0.3 * USUAL})
    assert not any(host.problem for host in found)
    assert len(sent) == 5


def test_links_that_are_fast_enough_are_good_whatever_others_are() -> None:
    speeds: dict[Link, float | str] = {(number, (number + 1) % 4): 1e10 for number in range(4)}
    found, _ = measure(4, {**speeds, (2, 3): 6e8})
    assert not any(host.problem for host in found)


def test_two_bad_hosts_among_many() -> None:
    found, _ = measure(8, {**around(2, 8, 1e6), **around(6, 8, "Connection refused")})
    assert [number for number, host in enumerate(found) if host.problem] == [2, 6]
    assert "Connection refused" in found[6].problem
    assert "host" in found[2].problem


def test_processes_send_to_one_another() -> None:
    command = [sys.executable, "-m", "neox.launch.hosts.links", "lo", "token"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    missing = [*command[:3], "nowhere", "token"]
    with LinkMeasurement([command, command, missing], environment, 60) as measurement:
        found = measurement.send([(0, 1), (1, 0)])
        assert all(isinstance(speed, float) and speed > 1e5 for speed in found.values())
        assert isinstance(measurement.send([(0, 2)])[0, 2], str)


def test_the_address_is_that_of_the_configured_interface_or_of_ssh() -> None:
    assert address_of("nothing,lo", {}) == "127.0.0.1"
    assert address_of("^lo", {"SSH_CONNECTION": "10.0.0.1 4000 10.0.0.2 22"}) == "10.0.0.2"
    with pytest.raises(OSError, match="nowhere"):
        address_of("nowhere", {})
