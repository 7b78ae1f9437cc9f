"""The judgement of what hosts say about themselves; the asking itself is tried over ssh between two machines."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from neox.launch import doctor
from neox.launch.doctor import Checks, HostReport, examine, format_reports
from neox.launch.spec import Host, LaunchSpec

ROOT = Path(__file__).resolve().parents[3]


def spec(*names: str, python: str = sys.executable) -> LaunchSpec:
    hosts = tuple(Host(name, (0, 1)) for name in names)
    return LaunchSpec("id", hosts, "127.0.0.1", 29513, "s.py", (), "/", str(ROOT), "/tmp", python)


def answer(**changes: Any) -> dict[str, Any]:
    """A host in good order."""
    good = {"python": "3.11.7", "torch": "2.13.0", "deepspeed": "0.19.8", "code": "abc", "accelerators": 2}
    paths = {"/save": {"exists": True, "writable": True, "free": 2**40}, "/data": {"exists": True}}
    paths["/data"].update(writable=False, free=2**40)
    return {**good, "port": "free", "shared": True, "paths": paths, "clock": time.time(), **changes}


def judge(*answers: dict[str, Any]) -> list[HostReport]:
    names = [f"host{number}" for number in range(len(answers))]
    reports = [HostReport(Host(name, (0, 1)), said) for name, said in zip(names, answers, strict=True)]
    doctor._judge(reports, spec(*names), Checks(save_paths=("/save",), data_paths=("/data",)), code="abc")
    return reports


def test_hosts_in_good_order() -> None:
    reports = judge(answer(), answer(), answer(port=None))
    assert not any(report.problems for report in reports)
    assert "first thing to fix" not in format_reports(reports)


def test_each_problem_is_named_with_its_remedy() -> None:
    full = {"/save": {"exists": True, "writable": True, "free": 2**20}, "/data": {"exists": False, "free": 1}}
    locked = {"/save": {"exists": True, "writable": False, "free": 2**40}, "/data": {"exists": True, "free": 2**40}}
    cases = {
        "torch is 2.11.0, elsewhere 2.13.0": answer(torch="2.11.0"),
        "deepspeed is not installed": answer(deepspeed="missing"),
        "code of this project is xyz": answer(code="xyz"),
        "2 slots, but 1 accelerators": answer(accelerators=1),
        "master port 29513: Address already in use": answer(port="Address already in use"),
        "the directory must be shared": answer(shared=False),
        "/save has only 1 MiB free": answer(paths=full),
        "/data does not exist there": answer(paths=full),
        "/save cannot be written": answer(paths=locked),
        "its clock is +": answer(clock=time.time() + 3600),
    }
    for words, said in cases.items():
        reports = judge(answer(), answer(), said)
        assert words in format_reports(reports), words
        assert not reports[0].problems
        assert "first thing to fix, on host2" in format_reports(reports)
    assert "no accelerator: CPU ranks" in format_reports(judge(answer(accelerators=0)))


def test_asking_this_machine(tmp_path: Path) -> None:
    checks = Checks(save_paths=(str(tmp_path / "save" / "checkpoints"),), data_paths=(str(tmp_path / "none.bin"),))
    (report,) = examine(spec("localhost"), checks, os.environ)
    assert report.answer["python"] == sys.version.split()[0]
    assert report.answer["torch"] != "missing"
    assert report.problems == [
        f"{tmp_path / 'none.bin'} does not exist there: put the data on a shared file system, or copy it"
    ]
    assert not (tmp_path / "save").exists()
    (tmp_path / "save" / "checkpoints").mkdir(parents=True)
    examine(spec("localhost"), checks, os.environ)
    assert not list((tmp_path / "save" / "checkpoints").iterdir())
    (report,) = examine(spec("localhost", python="/nowhere/python"), Checks(), os.environ)
    assert "no Python at /nowhere/python" in report.problems[0]


def test_a_save_path_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    save = tmp_path / "file" / "checkpoints"
    (report,) = examine(spec("localhost"), Checks(save_paths=(str(save),)), os.environ)
    assert report.problems == [
        f"{save} cannot be written on this machine: Not a directory",
        f"{save} cannot be written",
    ]
