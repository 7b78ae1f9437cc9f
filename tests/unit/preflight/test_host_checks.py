"""Memory of hosts that have been asked, compared with what their ranks need."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from neox.config import NOTHING
from neox.errors import ConfigError, LaunchError
from neox.launch import Host
from neox.launch.hosts.doctor import HostReport
from neox.launch.hosts.placement import ChosenBy, Placement
from neox.launch.hosts.vendors import ASCEND, NVIDIA
from neox.preflight import host_checks
from neox.preflight.command_line import find_script, parse_arguments
from neox.preflight.dry_run import DryRun
from neox.preflight.host_checks import check_backend, check_compilers, check_memory, hosts_without_room
from neox.preflight.planning import read_config
from neox.preflight.restarts import Restarts
from neox.preflight.start_run import StartRun
from tests.plans import SMALL, plan_of

DATA = Path(__file__).resolve().parents[2] / "golden" / "data"
ENOUGH = 2**40
LITTLE = 2**20


def reports_of(*memory: int) -> list[HostReport]:
    reports = []
    for number, available in enumerate(memory):
        answer = {"memory": available, "accelerators": 0, "paths": {}}
        answer["formats"] = {"devices": "CPU", "bf16": True, "fp16": True}
        reports.append(HostReport(Host(f"host{number}", (0, 1)), answer))
    return reports


def test_hosts_without_memory_for_their_ranks() -> None:
    plan = plan_of(world_size=6, **SMALL)
    check_memory(plan, reports_of(ENOUGH, ENOUGH, ENOUGH), training=True)
    reports = reports_of(ENOUGH, LITTLE, ENOUGH)
    reasons = hosts_without_room(plan, reports, training=True)
    assert list(reasons) == ["host1"]
    assert "host1" in reasons["host1"]
    with pytest.raises(LaunchError, match="host1"):
        check_memory(plan, reports, training=True)


def test_hosts_without_a_compiler_for_a_kernel_that_deepspeed_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    quantized = {"stage": 3, "zero_quantized_weights": True}
    plan = plan_of(world_size=4, **SMALL, zero_optimization=quantized, bf16={"enabled": True})
    reports = reports_of(ENOUGH, ENOUGH)
    check_compilers(plan, reports, {})
    reports[1].answer["builds_kernels"] = False
    with pytest.raises(LaunchError, match=r"zero_quantized_weights.*host1"):
        check_compilers(plan, reports, {})
    monkeypatch.setattr(host_checks, "can_build_kernels", lambda environment: False)
    with pytest.raises(LaunchError, match="this machine"):
        check_compilers(plan, [], {})
    check_compilers(plan_of(world_size=4, **SMALL), reports, {})


def test_a_backend_of_another_vendor_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(world_size=4, **SMALL, distributed_backend="nccl")
    reports = reports_of(ENOUGH, ENOUGH)
    check_backend(plan, reports, {})
    for report in reports:
        report.answer |= {"accelerators": 2, "vendor": "NVIDIA"}
    check_backend(plan, reports, {})
    reports[1].answer["vendor"] = "Ascend"
    with pytest.raises(ConfigError, match=r"hccl.*host1"):
        check_backend(plan, reports, {})
    check_backend(plan_of(world_size=4, **SMALL), reports, {})
    monkeypatch.setattr(host_checks, "present_devices", lambda: (NVIDIA, 4))
    check_backend(plan, [], {})
    monkeypatch.setattr(host_checks, "present_devices", lambda: (ASCEND, 4))
    with pytest.raises(ConfigError, match="this machine"):
        check_backend(plan, [], {})
    check_backend(plan, [], {"DS_ACCELERATOR": "cpu"})


def test_a_backend_that_does_not_fit_the_planned_gpus_is_refused_in_a_dry_run(tmp_path: Path) -> None:
    file = tmp_path / "run.yml"
    for backend, kind, fits in (("nccl", "h100", True), ("nccl", "ascend910b", False), ("hccl", "mi250x", False)):
        file.write_text(json.dumps({**SMALL, "distributed_backend": backend, "gpu_type": kind}))
        arguments = parse_arguments(["train.py", str(file), "--dry-run", "--gpus", "8"])
        command = DryRun(arguments, read_config(arguments))
        _, planned, _ = command.plan_without_run()
        assert [problem.keys for problem in planned.refused] == [("distributed_backend",)] * (not fits)


def test_a_spare_host_replaces_one_without_memory(tmp_path: Path) -> None:
    keys = {**SMALL, "tokenizer_type": "HFTokenizer", "vocab_file": str(DATA / "tokenizer.json")}
    keys["data_path"] = str(DATA / "small_text_document")
    file = tmp_path / "run.yml"
    file.write_text(json.dumps(keys))
    arguments = parse_arguments(["train.py", str(file)])
    config = read_config(arguments)
    script = find_script("train.py")
    reports = reports_of(ENOUGH, LITTLE, ENOUGH)
    hosts = tuple(report.host for report in reports)
    placement = Placement(hosts[:2], ChosenBy.HOSTFILE, 0, "hostfile of -H", hosts[2:])
    command = StartRun(arguments, config)
    prepared = command._plan_on_fit_hosts(placement, script, Restarts(config, script), NOTHING, reports)
    assert [host.name for host in prepared.job.placement.hosts] == ["host0", "host2"]
    assert [report.host.name for report in prepared.reports] == ["host0", "host2"]
    assert "host2 replaces it" in prepared.left_out["host1"]
