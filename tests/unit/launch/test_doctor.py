"""The judgement of what hosts say about themselves; the asking itself is tried over ssh between two machines."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from neox.launch.hosts import doctor, vendors
from neox.launch.hosts.doctor import HostChecks, HostReport, examine_hosts, format_reports
from neox.launch.spec import Host, LaunchSpec
from tests.unit.launch.fake_machines import (
    amd_machine,
    ascend_machine,
    gaudi_machine,
    intel_machine,
    nvidia_machine,
)

ROOT = Path(__file__).resolve().parents[3]


def spec(*names: str, python: str = sys.executable) -> LaunchSpec:
    hosts = tuple(Host(name, (0, 1)) for name in names)
    return LaunchSpec("id", hosts, "127.0.0.1", 29513, "s.py", (), "/", str(ROOT), "/tmp", python)


def answer(**changes: Any) -> dict[str, Any]:
    """A host in good order."""
    good = {"python": "3.11.7", "torch": "2.13.0", "deepspeed": "0.19.8", "code": "abc", "accelerators": 2}
    paths = {"/save": {"exists": True, "writable": True, "free": 2**40}, "/data": {"exists": True}}
    paths["/data"].update(writable=False, free=2**40)
    good |= {"product_seconds": 0.001, "preemption": None}
    good |= {"port": "free", "product": True, "shared": True}
    return {**good, "paths": paths, "clock": time.time(), **changes}


def judge(*answers: dict[str, Any]) -> list[HostReport]:
    names = [f"host{number}" for number in range(len(answers))]
    reports = [HostReport(Host(name, (0, 1)), said) for name, said in zip(names, answers, strict=True)]
    doctor._judge_hosts(reports, spec(*names), HostChecks(save_paths=("/save",), data_paths=("/data",)), code="abc")
    return reports


def test_hosts_in_good_order() -> None:
    reports = judge(answer(), answer(), answer(port=None))
    assert not any(report.problems for report in reports)
    assert format_reports(reports).count("\n") == 4  # a title, three hosts and the legend


def test_each_problem_is_named_with_its_remedy() -> None:
    full = {"/save": {"exists": True, "writable": True, "free": 2**20}, "/data": {"exists": False, "free": 1}}
    locked = {"/save": {"exists": True, "writable": False, "free": 2**40}, "/data": {"exists": True, "free": 2**40}}
    cases: list[tuple[dict[str, Any], list[tuple[str, ...]]]] = [  # an answer, and the facts in each problem
        (answer(torch="2.11.0"), [("torch", "2.11.0", "2.13.0")]),
        (answer(deepspeed="missing"), [("deepspeed", "make install")]),
        (answer(code="xyz"), [("xyz", "abc")]),
        (answer(product=False), [("multiplies",)]),
        (answer(preemption="the notice"), [("preempted", "the notice")]),
        (answer(product_seconds=0.007), [("7 times", "median")]),
        (answer(accelerators=1), [("2 slots", "1 accelerator")]),
        (answer(accelerators=0), [("no accelerator", "driver")]),
        (answer(port="Address already in use"), [("29513", "Address already in use")]),
        (answer(shared=False), [("/save", "shared")]),
        (answer(paths=full), [("/save", "1 MiB"), ("/data",)]),
        (answer(paths=locked), [("/save",)]),
        (answer(clock=time.time() + 3600), [("+3600 s", "NTP")]),
    ]
    for said, facts in cases:
        reports = judge(answer(), answer(), said)
        assert not reports[0].problems
        assert not reports[1].problems
        for problem, words in zip(reports[2].problems, facts, strict=True):
            assert all(word in problem for word in words), problem
        last_line = format_reports(reports).splitlines()[-1]
        assert "host2" in last_line
        assert last_line.endswith(reports[2].problems[0])
    (npu,) = judge(answer(vendor="Ascend", torch_problem="8 Ascend devices, but torch_npu is not installed"))
    assert npu.problems == ["8 Ascend devices, but torch_npu is not installed"]
    old = answer(code="xyz")
    del old["preemption"]  # which hosts with the previous code do not send
    assert "xyz" in judge(answer(), old)[1].problems[0]
    assert not any(report.problems for report in judge(answer(accelerators=0), answer(), answer(accelerators=0)))
    (cpu_host,) = judge(answer(accelerators=0))
    assert not cpu_host.problems
    assert len(cpu_host.notes) == 1


def test_what_the_table_shows_of_accelerators() -> None:
    ascend = {"vendor": "Ascend", "driver": "23.0.rc2", "library": "CANN 8.0.RC1", "torch_build": "torch_npu 2.13.0"}
    here, plain = judge(answer(**ascend), answer(**ascend | {"library": None, "torch_build": None}))
    assert not here.problems
    lines = format_reports([here, plain]).splitlines()
    for fact in ("2 Ascend", "23.0.rc2, CANN 8.0.RC1", "2.13.0 (torch_npu 2.13.0)"):
        assert fact in lines[1]
        assert (fact in lines[2]) is (fact == "2 Ascend")


@pytest.mark.parametrize(
    ("make", "vendor", "facts", "lacking"),
    [
        (nvidia_machine, "8 NVIDIA", "535.129.03, CUDA 12.2", "torch with CUDA"),
        (amd_machine, "8 AMD", "6.8.5, ROCm 6.2.0-66", "requirements-rocm.txt"),
        (ascend_machine, "8 Ascend", "23.0.rc2, CANN 8.0.RC1", "torch_npu is not installed"),
        (gaudi_machine, "2 Gaudi", "1.16.0-94aac46", "habana_frameworks is not installed"),
        (intel_machine, "2 Intel", "1.24.2.17", "requirements-xpu.txt"),
    ],
)
def test_a_host_of_each_vendor_with_a_torch_for_cpus(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[Path], Path],
    vendor: str,
    facts: str,
    lacking: str,
) -> None:
    root = make(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    monkeypatch.delenv("ROCM_PATH", raising=False)
    monkeypatch.setattr(vendors, "torch_builds", dict)
    found, count = vendors.present_devices(root)
    assert found is not None
    said = {**vendors.accelerator_facts(root), "accelerators": count, "torch_problem": vendors.torch_problem({}, root)}
    (report,) = judge(answer(**said))
    (problem,) = report.problems
    assert lacking in problem
    assert "DS_ACCELERATOR=cpu" in problem
    line = format_reports([report]).splitlines()[1]
    assert vendor in line
    assert facts in line
    assert vendors.torch_problem({"DS_ACCELERATOR": "cpu"}, root) is None
    variables = vendors.device_variables((0, 1), {}, root)
    assert variables == {"DS_ACCELERATOR": found.accelerator, **dict.fromkeys(found.for_ranks, "0,1")}


def test_hosts_of_other_vendors_and_other_builds_of_torch() -> None:
    nvidia = {"vendor": "NVIDIA", "torch_build": "CUDA 12.8"}
    reports = judge(
        answer(**nvidia),
        answer(**nvidia),
        answer(vendor="AMD", torch_build="ROCm 6.4"),
        answer(**nvidia | {"torch_build": "CUDA 13.0"}),
    )
    assert [len(report.problems) for report in reports] == [0, 0, 2, 1]
    assert "CUDA 13.0" in reports[3].problems[0]
    assert "AMD" in reports[2].problems[1]


def test_asking_this_machine(tmp_path: Path) -> None:
    checks = HostChecks(save_paths=(str(tmp_path / "save" / "checkpoints"),), data_paths=(str(tmp_path / "none.bin"),))
    (report,) = examine_hosts(spec("localhost"), checks, os.environ)
    assert report.answer["python"] == sys.version.split()[0]
    assert report.answer["product"] is True
    assert report.answer["torch"] != "missing"
    (problem,) = report.problems
    assert problem.startswith(f"{tmp_path / 'none.bin'} ")
    assert not (tmp_path / "save").exists()
    (tmp_path / "save" / "checkpoints").mkdir(parents=True)
    examine_hosts(spec("localhost"), checks, os.environ)
    assert not list((tmp_path / "save" / "checkpoints").iterdir())
    (report,) = examine_hosts(spec("localhost", python="/nowhere/python"), HostChecks(), os.environ)
    assert "/nowhere/python" in report.problems[0]
    assert not report.unreachable


def test_a_host_that_ssh_cannot_reach() -> None:
    checks = HostChecks(always_ssh=True, ssh_port=9)  # nothing listens there
    (report,) = examine_hosts(spec("127.0.0.1"), checks, os.environ)
    assert report.unreachable
    assert report.problems[0].startswith("ssh failed")


def test_a_save_path_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    save = tmp_path / "file" / "checkpoints"
    (report,) = examine_hosts(spec("localhost"), HostChecks(save_paths=(str(save),)), os.environ)
    here, there = report.problems
    assert here.startswith(f"{save} ")
    assert here.endswith("Not a directory")
    assert there.startswith(f"{save} ")
