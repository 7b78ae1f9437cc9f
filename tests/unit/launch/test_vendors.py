"""Accelerators of each vendor by their device files, and the variables that show them to ranks."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from neox.errors import LaunchError
from neox.launch.agent.rank_group import host_variables
from neox.launch.environment import forwarded_environment
from neox.launch.hosts import machine, placement, vendors
from neox.launch.hosts.machine import visible_accelerators
from neox.launch.hosts.vendors import (
    AMD,
    ASCEND,
    INTEL,
    NVIDIA,
    VISIBLE_VARIABLES,
    Vendor,
    can_build_kernels,
    device_variables,
    devices_of_slots,
    present_devices,
    torch_problem,
    unused_devices,
    variables_of_rank,
)
from neox.launch.spec import Host, LaunchSpec
from tests.unit.launch.fake_machines import machine_with, render_node


@pytest.fixture(autouse=True)
def _nothing_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VISIBLE_VARIABLES, "DS_ACCELERATOR"):
        monkeypatch.delenv(name, raising=False)


def test_each_vendor_by_its_files(tmp_path: Path) -> None:
    assert present_devices(tmp_path) == (None, 0)
    nvidia = machine_with(tmp_path / "nvidia", "nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm")
    assert present_devices(nvidia) == (NVIDIA, 2)
    ascend = machine_with(tmp_path / "ascend", *(f"davinci{number}" for number in range(8)), "davinci_manager")
    assert present_devices(ascend) == (ASCEND, 8)
    amd = machine_with(tmp_path / "amd", "kfd")
    for number in range(128, 136):
        render_node(amd, number, "0x1002", place=f"0000:{number:x}:00.0", memory=64 * 2**30)
    render_node(amd, 136, "0x1a03", place="0000:02:00.0")  # the display of a server
    assert present_devices(amd) == (AMD, 8)
    intel = tmp_path / "intel"
    render_node(intel, 128, "0x8086", place="0000:00:02.0")  # a processor's own graphics
    assert present_devices(intel) == (None, 0)
    render_node(intel, 129, "0x8086", place="0000:29:00.0")
    assert present_devices(intel) == (INTEL, 1)


def test_graphics_of_processors_are_no_accelerators(tmp_path: Path) -> None:
    machine_with(tmp_path, "kfd")
    render_node(tmp_path, 128, "0x1002", place="0000:e5:00.0", memory=512 * 2**20)
    assert present_devices(tmp_path) == (None, 0)
    machine_with(tmp_path, "nvidia0")
    assert present_devices(tmp_path) == (NVIDIA, 1)


def test_graphics_of_processors_are_devices_of_a_torch_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TheRock#2535, legacy-rocm-build#5853: 512 MiB carved out and 110 GiB of GTT; torch for ROCm has one device.

    Intel's processors have a device of torch for XPUs in the same way.
    """
    amd = machine_with(tmp_path / "amd", "kfd")
    render_node(amd, 128, "0x1002", place="0000:c4:00.0", memory=512 * 2**20)
    (amd / "sys/class/drm/renderD128/device/mem_info_gtt_total").write_text(f"{110 * 2**30}\n")
    intel = tmp_path / "intel"
    render_node(intel, 128, "0x8086", place="0000:00:02.0")
    for build, root, vendor in (("hip", amd, AMD), ("xpu", intel, INTEL)):
        monkeypatch.setattr(vendors, "torch_builds", dict)
        assert present_devices(root) == (None, 0)
        monkeypatch.setattr(vendors, "torch_builds", lambda build=build: {build: "7.2"})
        assert present_devices(root) == (vendor, 1)
        assert vendors.torch_problem({}, root) is None
        assert device_variables([0], {}, root)["DS_ACCELERATOR"] == vendor.accelerator
    assert AMD.memory(amd) == [110 * 2**30]
    monkeypatch.setattr(vendors, "torch_builds", lambda: {"hip": "7.2"})
    render_node(amd, 129, "0x1002", place="0000:03:00.0", memory=24 * 2**30)
    assert present_devices(amd) == (AMD, 1)  # a card beside it
    assert AMD.memory(amd) == [24 * 2**30]


def test_only_gpus_that_compute_may_lack_kfd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container with `/dev/dri` alone: a processor's graphics are no reason to refuse ranks on CPUs."""
    monkeypatch.setattr(vendors, "torch_builds", lambda: {"hip": "6.4"})
    render_node(tmp_path, 128, "0x1002", place="0000:e5:00.0", memory=512 * 2**20)
    render_node(tmp_path, 129, "0x1a03", place="0000:22:00.0")
    assert vendors.torch_problem({}, tmp_path) is None
    render_node(tmp_path, 130, "0x1002", place="0000:01:00.0", memory=64 * 2**30)
    assert "1 AMD devices, but no /dev/kfd" in str(vendors.torch_problem({}, tmp_path))
    machine_with(tmp_path, "kfd")
    assert "no /dev/kfd" not in str(vendors.torch_problem({}, tmp_path))


def test_gpus_of_wsl_are_those_that_nvidia_smi_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = machine_with(tmp_path, "dxg")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert present_devices(root) == (None, 0)
    # torch may find what nvidia-smi does not list, such as AMD's under WSL: nothing is hidden, nothing is forced
    assert device_variables((0,), {}, root) == {}
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\nprintf 'GPU 0: NVIDIA GeForce RTX 4090 (UUID: GPU-1)\\n'\n")
    command.chmod(0o755)
    assert present_devices(root) == (NVIDIA, 1)
    assert device_variables((0,), {}, root) == {"DS_ACCELERATOR": "cuda", "CUDA_VISIBLE_DEVICES": "0"}


def test_variables_of_each_vendor(tmp_path: Path) -> None:
    assert device_variables((0, 1), {}, tmp_path) == {"DS_ACCELERATOR": "cpu"}  # and no variable hides anything
    ascend = machine_with(tmp_path / "ascend", "davinci0", "davinci1")
    assert device_variables((0, 1), {}, ascend) == {"DS_ACCELERATOR": "npu", "ASCEND_RT_VISIBLE_DEVICES": "0,1"}
    assert device_variables((1, 0), {}, ascend)["ASCEND_RT_VISIBLE_DEVICES"] == "0,1"  # torch_npu wants them to ascend
    given = {"ASCEND_RT_VISIBLE_DEVICES": "6,7", "CUDA_VISIBLE_DEVICES": ""}
    assert device_variables((1,), given, ascend) == {"DS_ACCELERATOR": "npu", "ASCEND_RT_VISIBLE_DEVICES": "7"}
    amd = machine_with(tmp_path / "amd", "kfd", "dri/renderD128", "dri/renderD129")
    both = {"DS_ACCELERATOR": "cuda", "HIP_VISIBLE_DEVICES": "0,1", "CUDA_VISIBLE_DEVICES": "0,1"}
    assert device_variables((0, 1), {}, amd) == both
    hidden = {"HIP_VISIBLE_DEVICES": "", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    assert device_variables((0, 1), {"HIP_VISIBLE_DEVICES": ""}, amd) == hidden
    assert device_variables((0, 1), {"DS_ACCELERATOR": "cpu"}, amd) == hidden
    assert device_variables((0, 1, 2), {}, amd) == {}  # more ranks than devices, as tools may have


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (0, 1, 2, 3)),
        ({"CUDA_VISIBLE_DEVICES": "2,3"}, (2, 3)),
        ({"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "2,3"}, (1,)),
        ({"ROCR_VISIBLE_DEVICES": "2,3"}, (0, 1)),
        ({"ROCR_VISIBLE_DEVICES": "2,3", "CUDA_VISIBLE_DEVICES": "2,3"}, (0, 1)),  # slurm sets both
        ({"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "1"}, (1,)),
        ({"ROCR_VISIBLE_DEVICES": ""}, ()),
    ],
)
def test_amds_lists_as_torch_reads_them(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: tuple[int, ...]
) -> None:
    assert AMD.visible_devices(4, environment) == expected
    if environment.get("ROCR_VISIBLE_DEVICES") == "":
        return  # torch counts one entry
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert tuple(torch.cuda._parse_visible_devices()[:4]) == (expected if environment else (0, 1, 2, 3))


def test_slots_are_positions_or_else_entries_of_the_hosts_own_list() -> None:
    assert devices_of_slots((0, 1), (4, 5, 6, 7)) == (4, 5)
    assert devices_of_slots((0, 1), (1, 0)) == (1, 0)
    assert devices_of_slots((4, 7), (4, 5, 6, 7)) == (4, 7)
    assert devices_of_slots((1,), ("GPU-ab", "GPU-cd")) == ("GPU-cd",)
    assert devices_of_slots((0, 4), (4, 5, 6, 7)) is None


def agent_variables(monkeypatch: pytest.MonkeyPatch, vendor: Vendor, present: int, slots: int) -> dict[str, str]:
    """Variables that the agent of a host with these devices gives to its ranks."""
    monkeypatch.setattr(vendors, "present_devices", lambda root=None: (vendor, present))
    hosts = (Host("node7", tuple(range(slots))),)
    spec = LaunchSpec("id", hosts, "::1", 1, "s.py", (), "/", "/", "/", sys.executable)
    return host_variables(spec, 0, spec.hosts[0], {}, Path("progress"))


@pytest.mark.parametrize("own", ["4,5,6,7", "GPU-a,GPU-b,GPU-c,GPU-d", "3,2,1,0"])
def test_the_devices_that_a_scheduler_gave_to_the_host_are_kept(monkeypatch: pytest.MonkeyPatch, own: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", own)
    assert agent_variables(monkeypatch, NVIDIA, 8, 4)["CUDA_VISIBLE_DEVICES"] == own
    assert agent_variables(monkeypatch, NVIDIA, 8, 2)["CUDA_VISIBLE_DEVICES"] == ",".join(own.split(",")[:2])


def test_each_rank_gets_an_instance_of_a_divided_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a,MIG-b")
    shared = agent_variables(monkeypatch, NVIDIA, 1, 2)
    assert [variables_of_rank(shared, rank)["CUDA_VISIBLE_DEVICES"] for rank in (0, 1)] == ["MIG-a", "MIG-b"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    shared = agent_variables(monkeypatch, NVIDIA, 8, 2)
    assert variables_of_rank(shared, 1) == {**shared, "LOCAL_RANK": "1"}


def test_compile_workers_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(96)))
    assert agent_variables(monkeypatch, NVIDIA, 8, 8)["TORCHINDUCTOR_COMPILE_THREADS"] == "12"
    assert agent_variables(monkeypatch, NVIDIA, 8, 1)["TORCHINDUCTOR_COMPILE_THREADS"] == "32"
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "2")
    assert agent_variables(monkeypatch, NVIDIA, 8, 8)["TORCHINDUCTOR_COMPILE_THREADS"] == "2"


def test_a_torch_that_cannot_use_the_devices_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia = machine_with(tmp_path / "nvidia", "nvidia0")
    amd = machine_with(tmp_path / "amd", "kfd", "dri/renderD128")
    ascend = machine_with(tmp_path / "ascend", "davinci0")
    for builds, right in (({"cuda": "12.8"}, nvidia), ({"hip": "6.4"}, amd)):
        monkeypatch.setattr(vendors, "torch_builds", lambda builds=builds: builds)
        assert torch_problem({}, right) is None
        assert "does not find" in str(unused_devices({}, right))  # for example an old driver
        for other in {nvidia, amd, ascend} - {right}:
            assert torch_problem({}, other) is not None
            assert unused_devices({}, other) is not None
    monkeypatch.setattr(vendors, "torch_builds", dict)
    assert "CPUs only" in str(torch_problem({}, nvidia))
    assert "torch_npu" in str(torch_problem({}, ascend))
    assert torch_problem({"CUDA_VISIBLE_DEVICES": ""}, nvidia) is None
    assert torch_problem({"DS_ACCELERATOR": "cpu"}, ascend) is None
    assert torch_problem({}, tmp_path) is unused_devices({}, tmp_path) is None
    monkeypatch.setattr(vendors, "present_devices", lambda root=None: (NVIDIA, 1))
    here = placement.Placement((Host("localhost", (0,)),), placement.ChosenBy.NUM_GPUS, 1)
    with pytest.raises(LaunchError):
        placement.check_local_devices(here)


def test_what_the_installed_torch_is_built_for() -> None:
    torch = pytest.importorskip("torch")
    fields = {name: getattr(torch.version, name, None) for name in ("cuda", "hip", "xpu")}
    assert vendors.torch_builds() == {name: build for name, build in fields.items() if build is not None}


def test_the_release_of_torch_npu_must_be_that_of_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch_npu 2.13.0 requires torch 2.13.0.* (its wheel's metadata)."""
    ascend = machine_with(tmp_path, "davinci0")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: SimpleNamespace(submodule_search_locations=[]))
    versions = {"torch_npu": "2.13.0.post1", "torch": "2.13.0+cpu"}
    monkeypatch.setattr("importlib.metadata.version", versions.__getitem__)
    assert torch_problem({}, ascend) is None
    versions["torch_npu"] = "2.9.0"
    assert "torch_npu 2.9.0 does not fit torch 2.13.0" in str(torch_problem({}, ascend))


def test_of_several_vendors_devices_those_count_that_torch_can_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = machine_with(tmp_path, "nvidia0", "kfd", "dri/renderD128", "dri/renderD129")
    monkeypatch.setattr(vendors, "torch_builds", lambda: {"hip": "6.4"})
    assert present_devices(root) == (AMD, 2)
    monkeypatch.setattr(vendors, "torch_builds", dict)
    assert present_devices(root) == (NVIDIA, 1)


def test_backends_that_serve_each_vendor() -> None:
    usable = {
        "NVIDIA": {"auto", "gloo", "nccl"},
        "AMD": {"auto", "gloo", "nccl"},
        "Ascend": {"auto", "hccl"},
        "Gaudi": {"auto", "hccl"},
        "Intel": {"auto", "xccl", "ccl"},
    }
    for vendor in vendors.VENDORS:
        for backend in ("auto", "gloo", "nccl", "hccl", "xccl", "ccl"):
            assert (vendors.refused_backend(backend, vendor) is None) is (backend in usable[vendor.name])


def test_devices_are_not_counted_if_cpu_ranks_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "present_devices", lambda: (ASCEND, 8))
    assert visible_accelerators({}) == tuple(range(8))
    assert visible_accelerators({"ASCEND_RT_VISIBLE_DEVICES": "2,3"}) == (2, 3)
    assert visible_accelerators({"DS_ACCELERATOR": "cpu"}) == ()


def test_variables_of_every_vendor_travel_and_lists_of_devices_do_not() -> None:
    environment = {"HCCL_CONNECT_TIMEOUT": "7200", "HSA_NO_SCRATCH_RECLAIM": "1", "CCL_WORKER_COUNT": "1", "ZE_X": "1"}
    lists = dict.fromkeys(VISIBLE_VARIABLES, "0")
    assert forwarded_environment({**environment, **lists}) == environment
    aisc = {"NCCL_IB_HCA": "mlx5_0", "NCCL_DEBUG": "INFO", "AISC_JOB_NAME": "x"}
    assert forwarded_environment(aisc) == {"NCCL_DEBUG": "INFO"}


def test_the_compiler_of_cuda_is_where_torch_looks(tmp_path: Path) -> None:
    root = machine_with(tmp_path, "nvidia0")
    assert can_build_kernels({"PATH": ""}, tmp_path / "none")  # no GPU
    assert not can_build_kernels({"PATH": str(tmp_path)}, root)
    nvcc = tmp_path / "cuda/bin/nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.touch()
    nvcc.chmod(0o755)
    assert can_build_kernels({"PATH": str(nvcc.parent)}, root)
    assert can_build_kernels({"CUDA_HOME": str(tmp_path / "cuda")}, root)
    assert not can_build_kernels({"CUDA_HOME": "/none", "PATH": str(nvcc.parent)}, root)


def test_the_interface_of_each_vendors_collectives() -> None:
    names = {vendor.name: vendors.interface_variable(vendor.name) for vendor in vendors.VENDORS}
    assert names.pop("Intel") == vendors.interface_variable(None) == "GLOO_SOCKET_IFNAME"
    assert names.pop("Ascend") == names.pop("Gaudi") == "HCCL_SOCKET_IFNAME"
    assert set(names.values()) == {"NCCL_SOCKET_IFNAME"}
