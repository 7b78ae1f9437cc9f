"""What others reported of accelerators: lists of devices, containers, and programs that fail, hang or say N/A."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from neox.launch.environment import forwarded_environment
from neox.launch.hosts import device_facts, machine, vendors
from neox.launch.hosts.vendors import AMD, ASCEND, INTEL, NVIDIA, VISIBLE_VARIABLES, Vendor, present_devices
from tests.unit.launch.fake_machines import add_file, add_tool, machine_with, render_node

GIB = 2**30


@pytest.fixture(autouse=True)
def _nothing_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    for name in (*VISIBLE_VARIABLES, "DS_ACCELERATOR", "ZE_FLAT_DEVICE_HIERARCHY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    "text",
    ["0,-1,1", "-1", "", "NoDevFiles", "GPU-a,GPU-b", "MIG-a,MIG-b", "2,1", " 0, 1", "0,0", "all", "0-3x", "GPU-a,1"],
)
def test_lists_of_nvidias_gpus_are_read_as_torch_reads_them(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """CUDA's guide; ray#7014. What torch reads otherwise, or as nothing, is hidden on purpose or an error."""
    torch = pytest.importorskip("torch")
    environment = {"CUDA_VISIBLE_DEVICES": text}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
    by_torch = tuple(torch.cuda._parse_visible_devices())
    if NVIDIA.list_problem(8, environment) is None:
        assert NVIDIA.visible_devices(8, environment) == by_torch
    else:
        assert not NVIDIA.hides_all(environment)
        assert text in ("0,0", "all", "0-3x", "GPU-a,1")
    assert NVIDIA.hides_all(environment) == (text in ("-1", "", "NoDevFiles"))


@pytest.mark.parametrize(
    ("vendor", "name", "text"),
    [
        (NVIDIA, "CUDA_VISIBLE_DEVICES", "0,9"),
        (AMD, "HIP_VISIBLE_DEVICES", "8"),
        (ASCEND, "ASCEND_RT_VISIBLE_DEVICES", "0-3"),
        (ASCEND, "ASCEND_RT_VISIBLE_DEVICES", "0,0"),
        (INTEL, "ZE_AFFINITY_MASK", "level_zero:0"),
    ],
)
def test_a_list_that_a_driver_drops_in_silence_is_refused(
    monkeypatch: pytest.MonkeyPatch, vendor: Vendor, name: str, text: str
) -> None:
    """vllm-ascend PR 10227: CANN drops such entries, and a rank fails later with the number of another."""
    monkeypatch.setattr(vendors, "present_devices", lambda root=None: (vendor, 8))
    problem = vendors.torch_problem({name: text}, Path("/none"))
    assert problem is not None
    assert f"{name}={text}" in problem


def test_tiles_in_intels_mask() -> None:
    """pytorch PR 178496: a mask of tiles."""
    environment = {"ZE_AFFINITY_MASK": "0.0,0.1"}
    assert INTEL.visible_devices(2, environment) == ("0.0", "0.1")
    assert INTEL.list_problem(2, environment) is None


def test_a_container_with_one_file_of_a_hosts_eight(tmp_path: Path) -> None:
    """pyxis#47: only /dev/nvidia2; CUDA counts it as device 0, and 2 is none."""
    root = machine_with(tmp_path, "nvidia2", "nvidiactl", "nvidia-uvm")
    assert present_devices(root) == (NVIDIA, 1)
    assert NVIDIA.visible_devices(1, {}) == (0,)
    assert "CUDA_VISIBLE_DEVICES=2" in str(vendors.torch_problem({"CUDA_VISIBLE_DEVICES": "2"}, root))


def test_a_gpu_that_shares_the_hosts_memory(tmp_path: Path) -> None:
    """unsloth PR 10283, ArcticTraining PR 345: nvidia-smi has no memory of a GB10."""
    root = machine_with(tmp_path, "nvidia0")
    add_tool(tmp_path / "bin", "nvidia-smi", "[N/A]", "*memory.total*")
    add_tool(tmp_path / "bin", "nvidia-smi", "12.1", "*compute_cap*")
    assert NVIDIA.memory(root) == []
    assert NVIDIA.formats(root) == {"bf16": True, "fp16": True, "fp8": True, "fp8_experts": False}


def test_a_message_of_nvidia_smi_is_no_value(tmp_path: Path) -> None:
    """intel/llvm#17614, mozilla/translations#1167: it prints its version where values are expected."""
    text = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 550.144"
    add_tool(tmp_path / "bin", "nvidia-smi", text)
    assert set(NVIDIA.formats(tmp_path).values()) == {None}
    assert NVIDIA.memory(tmp_path) == []
    assert NVIDIA.driver(tmp_path) is NVIDIA.library(tmp_path) is None


def test_memory_of_an_instance_of_mig_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nvitop PR 8: nvidia-smi's field is that of the whole GPU; sglang#2933: or it may not be read."""
    add_tool(tmp_path / "bin", "nvidia-smi", "40536", "*memory.total*")
    monkeypatch.setattr(machine, "present_devices", lambda: (NVIDIA, 1))
    assert machine.smallest_memory() == 40536 * 2**20
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a,MIG-b")
    assert machine.smallest_memory() is None


def test_a_program_that_hangs_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gpud PR 117, gpu-monitoring-tools#46: nvidia-smi in a call of the driver that no signal ends."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/nvidia-smi").write_text("#!/bin/sh\nsleep 60\n")
    (tmp_path / "bin/nvidia-smi").chmod(0o755)
    monkeypatch.setattr(device_facts, "_PATIENCE", 0.2)
    monkeypatch.setattr(device_facts.subprocess.Popen, "wait", lambda *_, **__: pytest.fail("waits"))
    started = time.monotonic()
    assert NVIDIA.memory(tmp_path) == []
    assert time.monotonic() - started < 30


def test_kfd_without_gpus_and_gpus_without_kfd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ollama#17104: kfd alone, with processors in its topology. unsloth PR 10473: render nodes alone."""
    bare = machine_with(tmp_path / "bare", "kfd")
    add_file(bare, "sys/class/kfd/kfd/topology/nodes/0/properties", "cpu_cores_count 16\ngfx_target_version 0\n")
    render_node(bare, 128, "0x1af4", place="0000:00:01.0")  # virtio's display
    assert present_devices(bare) == (None, 0)
    monkeypatch.setattr(vendors, "torch_builds", lambda: {"hip": "7.2"})
    assert vendors.torch_problem({}, bare) is None
    closed = tmp_path / "closed"
    render_node(closed, 128, "0x1002", place="0000:03:00.0", memory=64 * GIB)
    assert "/dev/kfd" in str(vendors.torch_problem({}, closed))
    assert vendors.torch_problem({"DS_ACCELERATOR": "cpu"}, closed) is None
    monkeypatch.setattr(vendors, "torch_builds", dict)
    assert vendors.torch_problem({}, closed) is None  # a display


def test_a_kfd_that_this_account_may_not_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """unsloth PR 10473: an account outside of the group `render`."""
    root = machine_with(tmp_path, "kfd")
    render_node(root, 128, "0x1002", place="0000:03:00.0", memory=64 * GIB)
    monkeypatch.setattr(vendors, "torch_builds", lambda: {"hip": "7.2"})
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert "render" in str(vendors.unused_devices({}, root))


def test_displays_that_are_no_accelerators(tmp_path: Path) -> None:
    """rocm_smi_lib#217: card 0 is the ASPEED display of the board."""
    for number, vendor in enumerate(("0x1a03", "0x1234", "0x1b36", "0x15ad", "0x1af4")):
        render_node(tmp_path, 128 + number, vendor, place=f"0000:0{number}:00.0")
    assert present_devices(tmp_path) == (None, 0)


def test_rocm_smi_without_data(tmp_path: Path) -> None:
    """legacy-rocm-build#4374: a warning on the standard output instead of JSON."""
    machine_with(tmp_path, "kfd", "dri/renderD128")
    add_tool(tmp_path / "bin", "rocm-smi", "WARNING: No JSON data to report")
    assert AMD.memory(tmp_path) == []


def test_a_table_of_ranks_is_known_to_every_host() -> None:
    """HCCL reads RANK_TABLE_FILE on each host; a host without it would wait for others in another way."""
    assert forwarded_environment({"RANK_TABLE_FILE": "/shared/hccl.json"}) == {"RANK_TABLE_FILE": "/shared/hccl.json"}
