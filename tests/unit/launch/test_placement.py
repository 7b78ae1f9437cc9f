"""Which hosts and how many ranks: the order of precedence, devices, addresses and ports."""

from __future__ import annotations

import socket
from argparse import Namespace
from itertools import chain, count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from neox.config import NeoXConfig
from neox.config.sections.runner import RunnerConfig
from neox.errors import ConfigError, LaunchError
from neox.launch.hosts import machine, rendezvous
from neox.launch.hosts.host_groups import host_groups, ranks_of_hosts
from neox.launch.hosts.hostfile import is_loopback
from neox.launch.hosts.placement import (
    ChosenBy,
    Placement,
    check_local_devices,
    choose_hosts,
    place_ranks,
)
from neox.launch.hosts.rendezvous import master_address, master_port, master_port_problem
from neox.launch.hosts.vendors import NVIDIA
from neox.launch.spec import Host
from neox.plan import Topology
from neox.problems import COMMAND_LINE, Source


@pytest.fixture(autouse=True)
def _no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    devices(monkeypatch, 0)


def devices(monkeypatch: pytest.MonkeyPatch, count: int, visible: str | None = None) -> None:
    """Pretend that this machine has `count` GPUs."""
    monkeypatch.setattr(machine, "present_devices", lambda: (NVIDIA, count) if count else (None, 0))
    monkeypatch.delenv("DLTS_HOSTFILE", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)


def refused_keys(**keys: Any) -> tuple[str, ...]:
    """The keys of the problem with which a choice of hosts is refused."""
    with pytest.raises(ConfigError) as error:
        check_local_devices(place_ranks(RunnerConfig(**keys)))
    (problem,) = error.value.problems
    return problem.keys


def test_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "hosts"
    path.write_text("a slots=4\nb slots=4\n")
    assert place_ranks(RunnerConfig()).world_size == 1
    assert place_ranks(RunnerConfig(num_gpus=3)).world_size == 3
    assert place_ranks(RunnerConfig(num_gpus=3, global_num_gpus=96)).world_size == 96
    assert place_ranks(RunnerConfig(hostfile=str(path), num_gpus=3)).world_size == 6
    monkeypatch.setenv("DLTS_HOSTFILE", str(path))
    assert place_ranks(RunnerConfig()).world_size == 8
    assert place_ranks(RunnerConfig()).hostfile == f"{path} of DLTS_HOSTFILE"
    (tmp_path / "other").write_text("c slots=1\n")
    other = RunnerConfig(hostfile=str(tmp_path / "other"))
    assert place_ranks(other, Source.in_file("model.yml", 3)).world_size == 8
    assert place_ranks(other, COMMAND_LINE).hostfile == f"{other.hostfile} of -H"
    monkeypatch.delenv("DLTS_HOSTFILE")
    assert place_ranks(other, Source.in_file("model.yml", 3)).hostfile.endswith("of model.yml:3")
    monkeypatch.setenv("DLTS_HOSTFILE", str(path))
    devices(monkeypatch, 8)
    assert place_ranks(RunnerConfig()).world_size == 8
    assert refused_keys(hostfile=str(path), global_num_gpus=96) == ("global_num_gpus",)


def test_slots_are_positions_among_visible_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    devices(monkeypatch, 8, "2,5")
    assert place_ranks(RunnerConfig()).hosts == (Host("localhost", (0, 1)),)
    assert place_ranks(RunnerConfig(num_gpus=1)).hosts == (Host("localhost", (0,)),)
    assert place_ranks(RunnerConfig(include="localhost:1")).hosts == (Host("localhost", (1,)),)
    devices(monkeypatch, 2, "GPU-ab,GPU-cd")
    assert place_ranks(RunnerConfig()).hosts == (Host("localhost", (0, 1)),)
    devices(monkeypatch, 2, "")
    assert place_ranks(RunnerConfig()).accelerators == 0


def test_too_many_ranks_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refused_keys(global_num_gpus=4096) == ("hostfile",)
    devices(monkeypatch, 2)
    check_local_devices(place_ranks(RunnerConfig(num_gpus=2)))
    assert refused_keys(num_gpus=4) == ("num_gpus",)


def test_hosts_without_a_hostfile() -> None:
    assert refused_keys(num_nodes=2) == ("num_nodes",)
    assert "include" in refused_keys(include="a@b")
    assert "exclude" in refused_keys(exclude="a")


def test_one_host_means_that_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "hosts"
    path.write_text("far.example.org slots=2\n")
    there = place_ranks(RunnerConfig(hostfile=str(path)))
    assert not there.is_local
    assert master_address(there, RunnerConfig()) == "far.example.org"
    assert 20000 <= master_port(there, RunnerConfig()) <= 32000
    for name in (socket.gethostname(), "localhost", "127.0.0.1", "127.0.1.1", "::1"):
        path.write_text(f"{name} slots=2\n")
        assert place_ranks(RunnerConfig(hostfile=str(path))).is_local
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(socket.AF_INET, 2, 17, "", ("127.0.0.1", 0))])
    path.write_text("login.example.org slots=2\n")  # a name that only a server knows
    assert place_ranks(RunnerConfig(hostfile=str(path))).hosts == (Host("localhost", (0, 1)),)


def test_addresses_and_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    here = place_ranks(RunnerConfig(num_gpus=2))
    assert master_address(here, RunnerConfig()) == "127.0.0.1"
    assert master_address(here, RunnerConfig(master_addr="10.0.0.1")) == "10.0.0.1"
    with pytest.raises(ConfigError):
        master_address(here, RunnerConfig(master_addr="$(id)"))
    remote = Placement((Host("root@far", (0,)), Host("b", (0,))), ChosenBy.HOSTFILE, 0)
    assert master_address(remote, RunnerConfig()) == "far"
    pair = Placement((Host("localhost", (0,)), Host("192.0.2.77", (0,))), ChosenBy.HOSTFILE, 0)
    assert not is_loopback(master_address(pair, RunnerConfig()))  # the other host would call itself
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"master_port {port}" in str(master_port_problem(here, RunnerConfig(master_port=port)))
        assert master_port_problem(remote, RunnerConfig(master_port=port)) is None
    assert master_port_problem(here, RunnerConfig(master_port=port)) is None
    assert master_port(here, RunnerConfig(master_port=port)) == port
    ports = [master_port(here, RunnerConfig()) for _ in range(20)]
    assert all(20000 <= port <= 32000 for port in ports)  # not those of outgoing connections


def test_runs_that_start_together_choose_different_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = chain([31001, 31001], count(31002))
    monkeypatch.setattr(
        rendezvous.random, "SystemRandom", lambda: SimpleNamespace(randint=lambda low, high: next(wanted))
    )
    here = place_ranks(RunnerConfig(num_gpus=2))
    assert master_port(here, RunnerConfig()) != master_port(here, RunnerConfig())


def test_the_slurm_allocation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\n[ \"$*\" = 'show hostnames node[1-2]' ] && printf 'node1\\nnode2\\n'\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[1-2]")
    assert place_ranks(RunnerConfig(num_gpus=2)).is_local  # only `launcher: slurm` asks slurm
    found = place_ranks(RunnerConfig(launcher="slurm", num_gpus=2))
    assert found.hosts == (Host("node1", (0, 1)), Host("node2", (0, 1)))
    assert refused_keys(launcher="slurm") == ("num_gpus",)
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "8")
    assert place_ranks(RunnerConfig(launcher="slurm", num_nodes=1)).world_size == 8
    monkeypatch.delenv("SLURM_GPUS_ON_NODE")
    for text, gpus in (("a100:4", 4), ("a100", 1), ("2", 2)):
        monkeypatch.setenv("SLURM_GPUS_PER_NODE", text)
        assert place_ranks(RunnerConfig(launcher="slurm", num_nodes=1)).world_size == gpus
    monkeypatch.setenv("SLURM_JOB_NODELIST", "elsewhere")
    with pytest.raises(LaunchError):
        place_ranks(RunnerConfig(launcher="slurm"))


def choose(dry_run: bool = True, hosts: int | None = None, gpus: int | None = None, **keys: Any) -> tuple[int, str]:
    config = NeoXConfig.from_flat({"pipe_parallel_size": 4, "model_parallel_size": 2, **keys})
    placement, warnings = choose_hosts(config, Namespace(dry_run=dry_run, hosts=hosts, gpus=gpus))
    return placement.world_size, "\n".join(warnings)


def test_a_dry_run_assumes_what_is_not_said() -> None:
    config = NeoXConfig.from_flat({"pipe_parallel_size": 2, "num_gpus": 2})
    asked = Namespace(dry_run=True, hosts=None, gpus=None)
    assert choose_hosts(config, asked)[0].chosen_by is ChosenBy.NUM_GPUS
    ranks, warning = choose()
    assert ranks == 8
    assert "8 ranks" in warning
    assert choose(global_num_gpus=96) == choose(global_num_gpus=96, num_gpus=96) == (96, "")
    ranks, warning = choose(global_num_gpus=96, num_gpus=8)
    assert ranks == 96
    assert "`num_gpus: 8`" in warning
    assert "`global_num_gpus: 96`" in warning
    with pytest.raises(ConfigError):
        choose(hostfile="none", global_num_gpus=16)
    assert choose(hosts=12, gpus=8) == (96, "")
    with pytest.raises(ConfigError):
        choose(hosts=10**9)


def test_a_launch_assumes_nothing(tmp_path: Path) -> None:
    assert choose(dry_run=False) == (1, "")  # which the grid refuses
    with pytest.raises(ConfigError) as caught:
        choose(dry_run=False, hostfile="none", hidden_size=63, num_attention_heads=2)
    assert "hidden_size: 63" in str(caught.value)
    assert "hostfile none does not exist" in str(caught.value.problems[-1])


def hosts_with(*slots: int) -> list[Host]:
    return [Host(f"h{i}", tuple(range(count))) for i, count in enumerate(slots)]


def test_hosts_that_are_alike_are_one_group() -> None:
    groups = host_groups(Topology(2, 4, 2), hosts_with(4, 4, 4, 4))
    assert [(group.names, group.ranks, group.stages) for group in groups] == [
        (("h0", "h1"), (0, 7), (0, 0)),
        (("h2", "h3"), (8, 15), (1, 1)),
    ]
    for words in ("h0 to h1", "4 slots", "ranks 0-7", "stage 0"):
        assert words in str(groups[0])


def test_a_host_may_hold_several_stages_and_hosts_may_differ() -> None:
    groups = host_groups(Topology(4, 1, 1), hosts_with(3, 1))
    assert [(group.ranks, group.stages) for group in groups] == [((0, 2), (0, 2)), ((3, 3), (3, 3))]
    assert "rank 3, stage 3" in str(groups[1])
    assert [group.names for group in ranks_of_hosts(Topology(1, 2, 1), hosts_with(1, 1))] == [("h0",), ("h1",)]


def test_deepspeeds_file_may_ask_for_cpu_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices(monkeypatch, 4)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert place_ranks(RunnerConfig()).accelerators == 4
    (tmp_path / ".deepspeed_env").write_text("DS_ACCELERATOR=cpu\n")
    assert place_ranks(RunnerConfig()).accelerators == 0
