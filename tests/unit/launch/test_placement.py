"""Which hosts and how many ranks: the order of precedence, devices, addresses and ports."""

from __future__ import annotations

import socket
from itertools import chain, count
from pathlib import Path
from types import SimpleNamespace

import pytest

from neox.errors import LaunchError
from neox.launch import accelerators, placement
from neox.launch.placement import (
    Request,
    check_local_devices,
    master_address,
    master_port,
    master_port_problem,
    place,
)
from neox.launch.spec import Host


@pytest.fixture(autouse=True)
def _no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    devices(monkeypatch, 0)


def devices(monkeypatch: pytest.MonkeyPatch, count: int, visible: str | None = None) -> None:
    """Pretend that this machine has so many GPUs."""
    monkeypatch.setattr(accelerators, "_present", lambda: count)
    monkeypatch.delenv("DLTS_HOSTFILE", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)


def test_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "hosts"
    path.write_text("a slots=4\nb slots=4\n")
    assert place(Request()).world_size == 1
    assert place(Request(num_gpus=3)).world_size == 3
    assert place(Request(num_gpus=3, global_num_gpus=96)).world_size == 96
    assert place(Request(hostfile=str(path), num_gpus=3)).world_size == 6
    monkeypatch.setenv("DLTS_HOSTFILE", str(path))
    assert place(Request()).world_size == 8
    assert "hosts" in place(Request()).why
    devices(monkeypatch, 8)
    assert place(Request()).world_size == 8
    with pytest.raises(LaunchError, match="96, but the chosen hosts"):
        place(Request(hostfile=str(path), global_num_gpus=96))


def test_visible_devices_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    devices(monkeypatch, 8, "2,5")
    assert place(Request()).hosts == (Host("localhost", (2, 5)),)
    assert place(Request(num_gpus=1)).hosts == (Host("localhost", (2,)),)
    assert place(Request(include="localhost:1")).hosts == (Host("localhost", (5,)),)
    devices(monkeypatch, 2, "GPU-ab,GPU-cd")
    assert place(Request()).hosts == (Host("localhost", ("GPU-ab", "GPU-cd")),)
    devices(monkeypatch, 2, "")
    assert place(Request()).accelerators == 0


def test_too_many_ranks_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LaunchError, match="name the hosts in a hostfile"):
        check_local_devices(place(Request(global_num_gpus=4096)))
    devices(monkeypatch, 2)
    check_local_devices(place(Request(num_gpus=2)))
    with pytest.raises(LaunchError, match="has 2 accelerators"):
        check_local_devices(place(Request(num_gpus=4)))


def test_hosts_without_a_hostfile() -> None:
    for request in (Request(num_nodes=2), Request(include="a@b"), Request(exclude="a")):
        with pytest.raises(LaunchError, match="hostfile"):
            place(request)


def test_one_remote_host_means_that_host(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("far.example.org slots=2\n")
    there = place(Request(hostfile=str(path)))
    assert not there.is_local
    assert master_address(there, Request()) == "far.example.org"
    assert 20000 <= master_port(there, Request()) <= 32000
    path.write_text(f"{socket.gethostname()} slots=2\n")
    assert place(Request(hostfile=str(path))).is_local


def test_addresses_and_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    here = place(Request(num_gpus=2))
    assert master_address(here, Request()) == "127.0.0.1"
    assert master_address(here, Request(master_addr="10.0.0.1")) == "10.0.0.1"
    with pytest.raises(LaunchError, match="master_addr"):
        master_address(here, Request(master_addr="$(id)"))
    remote = placement.Placement((Host("root@far", (0,)), Host("b", (0,))), "", 0)
    assert master_address(remote, Request()) == "far"
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        problem = master_port_problem(here, Request(master_port=port))
        assert f"master_port {port} is taken" in str(problem)
        assert master_port_problem(remote, Request(master_port=port)) is None
    assert master_port_problem(here, Request(master_port=port)) is None
    assert master_port(here, Request(master_port=port)) == port
    assert all(20000 <= master_port(here, Request()) <= 32000 for _ in range(20))  # not one for outgoing connections


def test_runs_that_start_together_choose_different_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = chain([31001, 31001], count(31002))
    monkeypatch.setattr(
        placement.random, "SystemRandom", lambda: SimpleNamespace(randint=lambda low, high: next(wanted))
    )
    here = place(Request(num_gpus=2))
    assert master_port(here, Request()) != master_port(here, Request())


def test_the_slurm_allocation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\n[ \"$*\" = 'show hostnames node[1-2]' ] && printf 'node1\\nnode2\\n'\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[1-2]")
    assert place(Request(num_gpus=2)).is_local  # only where slurm is asked for
    found = place(Request(launcher="slurm", num_gpus=2))
    assert found.hosts == (Host("node1", (0, 1)), Host("node2", (0, 1)))
    with pytest.raises(LaunchError, match="SLURM_GPUS_ON_NODE"):
        place(Request(launcher="slurm"))
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "8")
    assert place(Request(launcher="slurm", num_nodes=1)).world_size == 8
    monkeypatch.setenv("SLURM_JOB_NODELIST", "elsewhere")
    with pytest.raises(LaunchError, match="name the hosts in a hostfile"):
        place(Request(launcher="slurm"))
