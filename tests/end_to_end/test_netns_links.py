"""A host whose network is slow, or broken except for ssh: the checks name it, and a spare host takes its place."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from neox.run_events import read_events
from tests.end_to_end.launched_runs import ROOT, LaunchedRun
from tests.end_to_end.network_namespaces import TwoMachines, two_machines, why_not

_REASON = why_not() or (None if shutil.which("tc", path="/usr/sbin:/sbin:/usr/bin:/bin") else "needs tc (iproute2)")
pytestmark = [pytest.mark.netns, pytest.mark.slow, pytest.mark.skipif(_REASON is not None, reason=_REASON or "")]

DATA = ROOT / "tests" / "golden" / "data" / "small_text_document"


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[TwoMachines]:
    (tmp_path / "machines").mkdir()
    with two_machines(tmp_path / "machines") as both:
        yield both


def start(machines: TwoMachines, directory: Path, hosts: Sequence[str], **variables: str) -> LaunchedRun:
    hostfile = directory / "hostfile"
    hostfile.write_text("".join(f"{host}\n" for host in hosts))
    keys = {"data_path": DATA, "train_iters": 4, "doctor_timeout": 30, "save": directory / "save", "overwrite": "true"}
    arguments = ["-H", str(hostfile), *(word for key, value in keys.items() for word in ("--set", f"{key}={value}"))]
    environment = {**machines.environment, **variables}
    return LaunchedRun(directory, arguments, None, None, machines.inside([]), **environment)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def test_a_spare_host_takes_the_place_of_one_with_a_slow_link(machines: TwoMachines, tmp_path: Path) -> None:
    first, second = machines.hosts
    third = machines.add_third_machine()
    slow = "tc qdisc add dev eth0 root tbf rate 16mbit burst 32kb latency 50ms"
    subprocess.run(machines.inside(slow.split(), 2), check=True)
    run = start(machines, tmp_path, [f"{first} slots=1", f"{third} slots=1", f"{second} slots=1 spare"])
    output = run.output(240)
    assert run.process.returncode == 0, output
    events = read_events(run.directory / "run")
    (left_out,) = [event for event in events if event["event"] == "host left out"]
    assert left_out["host"] == third
    assert first in left_out["reason"]  # the link to it
    assert second in left_out["reason"]  # which steps in
    assert [event["hosts"] for event in events if event["event"] == "start"] == [[first, second]]


def test_a_broken_link_of_the_configured_interface_is_named_before_anything_starts(
    machines: TwoMachines, tmp_path: Path
) -> None:
    first, second = machines.hosts
    ends = [f"ne{os.getpid()}", f"nf{os.getpid()}"]
    ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
    for number, end in enumerate(ends):
        name = machines.names[number]
        ip("link", "set", end, "netns", name)
        ip("-n", name, "link", "set", end, "name", "fabric0")
        ip("-n", name, "addr", "add", f"10.63.255.{number + 1}/24", "dev", "fabric0")
        ip("-n", name, "link", "set", "fabric0", "up")
    hosts = [f"{first} slots=1", f"{second} slots=1"]
    run = start(machines, tmp_path, hosts, GLOO_SOCKET_IFNAME="fabric0")
    assert run.output(240)
    assert run.process.returncode == 0
    ip("-n", machines.names[1], "link", "set", "fabric0", "down")
    run = start(machines, tmp_path, hosts, GLOO_SOCKET_IFNAME="fabric0")
    output = run.output(120)
    assert run.process.returncode == 1, output
    assert f"first thing to fix, on {second}: its link to {first}" in output
    assert not list(run.directory.rglob("rank_*.log"))
