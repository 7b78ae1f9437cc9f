"""What a machine says about its GPUs, its memory and its number formats."""

from __future__ import annotations

from pathlib import Path

import pytest

from neox.launch.hosts import machine
from neox.launch.hosts.machine import available_memory, memory_kills, native_formats, smallest_memory
from neox.launch.hosts.vendors import NVIDIA


@pytest.mark.parametrize(
    ("says", "expected"),
    [("81559\\n40960\\n", 40960 * 2**20), ("[N/A]\\n", None), ("", None)],
)
def test_smallest_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str, expected: int | None) -> None:
    command = tmp_path / "nvidia-smi"
    command.write_text(f"#!/bin/sh\nprintf '{says}'\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(machine, "present_devices", lambda: (NVIDIA, 2))
    assert smallest_memory() == expected


def test_memory_without_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(machine, "present_devices", lambda: (NVIDIA, 2))
    assert smallest_memory() is None
    monkeypatch.setattr(machine, "present_devices", lambda: (None, 0))
    assert smallest_memory() is None


@pytest.mark.parametrize(
    ("cpuinfo", "bf16", "fp16"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16\n", True, False),
        ("flags\t\t: fpu amx_bf16 amx_tile avx512_fp16\n", True, True),
        ("flags\t\t: fpu avx2 avx512f\nflags\t\t: fpu avx512_bf16\n", False, False),
        ("Features\t: fp asimd asimdhp bf16\n", True, True),
        ("model name\t: unknown\n", None, None),
        (None, None, None),
    ],
)
def test_formats_of_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpuinfo: str | None, bf16: bool | None, fp16: bool | None
) -> None:
    monkeypatch.setattr(machine, "present_devices", lambda: (None, 0))
    if cpuinfo is not None:
        (tmp_path / "cpuinfo").write_text(cpuinfo)
    formats = native_formats(tmp_path / "cpuinfo")
    assert formats == {
        "devices": "CPU",
        "family": "cpu",
        "bf16": bf16,
        "fp16": fp16,
        "fp8": None,
        "bf16_is_slow": False,
    }


@pytest.mark.parametrize(
    ("vendor", "flags", "slow"),
    [
        ("GenuineIntel", "avx512f avx512_bf16", True),
        ("GenuineIntel", "avx512f avx512_bf16 amx_bf16", False),
        ("GenuineIntel", "avx512f", False),
        ("AuthenticAMD", "avx512f avx512_bf16", False),
    ],
)
def test_kinds_of_cpus_that_train_slowly_in_bf16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vendor: str, flags: str, slow: bool
) -> None:
    monkeypatch.setattr(machine, "present_devices", lambda: (None, 0))
    (tmp_path / "cpuinfo").write_text(f"vendor_id\t: {vendor}\nflags\t\t: fpu {flags}\n")
    assert native_formats(tmp_path / "cpuinfo")["bf16_is_slow"] is slow


@pytest.mark.parametrize(
    ("says", "formats"),
    [
        ("9.0\n9.0\n", (True, True, True, True)),
        ("9.0\n8.9\n", (True, True, True, False)),
        ("10.0\n10.0\n", (True, True, True, False)),
        ("9.0\n8.0\n", (True, True, False, False)),
        ("9.0\n7.5\n", (False, True, False, False)),
        ("[N/A]\n", (None, None, None, None)),
    ],
)
def test_formats_of_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str, formats: tuple[bool | None, ...]
) -> None:
    command = tmp_path / "nvidia-smi"
    command.write_text(f"#!/bin/sh\nprintf '{says}'\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(machine, "present_devices", lambda: (NVIDIA, 2))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    expected = dict(zip(("bf16", "fp16", "fp8", "fp8_experts"), formats, strict=True))
    assert native_formats() == {"devices": "GPUs", "family": "cuda", "bf16_is_slow": False, **expected}


def test_memory_that_control_groups_leave(tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    assert available_memory(proc, groups) is None
    (proc / "meminfo").write_text("MemTotal: 4000 kB\nMemAvailable:    3000 kB\n")
    (proc / "self" / "cgroup").write_text("4:cpu,memory:/job/step\n0::/user/job\n")
    assert available_memory(proc, groups) == 3000 * 1024

    def group(path: str, **files: object) -> None:
        (groups / path).mkdir(parents=True, exist_ok=True)
        for name, value in files.items():
            (groups / path / f"memory.{name}").write_text(f"{value}\n")

    group("user", max=2_000_000, current=600_000, stat="anon 5\ninactive_file 100000")
    group("user/job", max="max", current=500_000, stat="inactive_file 0")
    assert available_memory(proc, groups) == 1_500_000
    group("memory/job", limit_in_bytes=900_000, usage_in_bytes=300_000, stat="total_inactive_file 1000")
    assert available_memory(proc, groups) == 601_000
    group("memory/job", usage_in_bytes=950_000)
    assert available_memory(proc, groups) == 1
    (proc / "vmstat").write_text("pgfault 9\noom_kill 3\n")
    assert memory_kills(proc / "vmstat") == 3
    assert memory_kills(proc / "none") is None
