"""What files and programs of each vendor say about memory, formats and versions, on machines that are imitated."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from neox.launch.hosts import machine, vendors
from neox.launch.hosts.vendors import AMD, ASCEND, GAUDI, INTEL, NVIDIA, VENDORS, Vendor, accelerator_facts
from tests.unit.launch.fake_machines import (
    ASCEND_TABLE,
    add_file,
    add_tool,
    amd_machine,
    ascend_machine,
    gaudi_machine,
    intel_machine,
    machine_with,
    nvidia_machine,
    render_node,
)

GIB = 2**30
MIB = 2**20


@pytest.fixture(autouse=True)
def _no_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    for name in ("ASCEND_HOME_PATH", "ROCM_PATH", "ZE_FLAT_DEVICE_HIERARCHY"):
        monkeypatch.delenv(name, raising=False)


CASES = [
    (nvidia_machine, NVIDIA, 8, 80 * GIB, "535.129.03", "CUDA 12.2", (True, True, False, False)),
    (amd_machine, AMD, 8, 68702699520, "6.8.5", "ROCm 6.2.0-66", (True, True, False, False)),
    (ascend_machine, ASCEND, 8, 61361 * MIB, "23.0.rc2", "CANN 8.0.RC1", (True, True, None, None)),
    (gaudi_machine, GAUDI, 2, 96 * GIB, "1.16.0-94aac46", None, (None, None, None, None)),
    (intel_machine, INTEL, 2, 64 * GIB, "backported from (1.24.2.17)", None, (None, None, None, None)),
]


@pytest.mark.parametrize(("make", "vendor", "count", "memory", "driver", "library", "formats"), CASES)
def test_facts_of_each_vendor(
    tmp_path: Path,
    make: Callable[[Path], Path],
    vendor: Vendor,
    count: int,
    memory: int,
    driver: str | None,
    library: str | None,
    formats: tuple[bool | None, ...],
) -> None:
    root = make(tmp_path)
    assert vendors.present_devices(root) == (vendor, count)
    assert min(vendor.memory(root)) == memory
    assert tuple(vendor.formats(root).values()) == formats
    facts = accelerator_facts(root)
    assert (facts["vendor"], facts["driver"], facts["library"]) == (vendor.name, driver, library)


def test_every_vendor_has_a_machine_here() -> None:
    assert {case[1].name for case in CASES} == {vendor.name for vendor in VENDORS}


def test_what_no_file_says_is_unknown(tmp_path: Path) -> None:
    for vendor in VENDORS:
        assert vendor.memory(tmp_path) == []
        assert set(vendor.formats(tmp_path).values()) == {None}
        assert vendor.driver(tmp_path) is vendor.library(tmp_path) is None


def test_what_the_launcher_and_a_host_take_from_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ascend_machine(tmp_path)
    monkeypatch.setattr(machine, "present_devices", lambda: (ASCEND, 8))
    for name in (*vendors.VISIBLE_VARIABLES, "DS_ACCELERATOR"):
        monkeypatch.delenv(name, raising=False)
    assert machine.smallest_memory() == 61361 * MIB  # torch_npu reports 60.97 GiB, 62433 MiB
    formats = machine.native_formats()
    assert formats["devices"] == "Ascend devices"
    assert (formats["bf16"], formats["fp16"], formats["fp8"]) == (True, True, None)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert machine.native_formats()["devices"] == "CPU"


@pytest.mark.parametrize(
    ("chip", "bf16"),
    [("910B1", True), ("910B4-1", True), ("910_9392", True), ("910B", False), ("910PremiumA", False), ("910", None)],
)
def test_the_first_generation_of_ascend_has_no_bf16(tmp_path: Path, chip: str, bf16: bool | None) -> None:
    """Names as in torch_npu: Ascend910B is the first generation, Ascend910B1 the second; 910C is `Ascend910` alone."""
    add_tool(tmp_path / "bin", "npu-smi", ASCEND_TABLE.replace("910B1", f"Ascend{chip}"), "info")
    assert ASCEND.formats(tmp_path)["bf16"] is bf16
    assert ASCEND.memory(tmp_path) == [61361 * MIB, 61361 * MIB]


def test_two_chips_of_an_ascend_910c(tmp_path: Path) -> None:
    """Lines of npu-smi on such a host, from ZStack's tests (zstacklib, test_huawei)."""
    lines = """\
| 2     Ascend910           | OK            | 163.1                |
| 0     4                   | 0000:95:00.0  | 0 / 0  2909 / 65536 |
| 2     Ascend910           | OK            | -                    |
| 1     5                   | 0000:97:00.0  | 0 / 0  2882 / 65536 |"""
    add_tool(tmp_path / "bin", "npu-smi", lines, "info")
    assert ASCEND.memory(tmp_path) == [(65536 - 2909) * MIB, (65536 - 2882) * MIB]


@pytest.mark.parametrize(
    ("targets", "formats"),
    [
        ((90010, 90402), (True, True, False, False)),  # MI250X, MI300X
        ((90500,), (True, True, True, False)),  # MI355X
        ((90402, 90006), (False, True, False, False)),  # with an MI50
        ((100300,), (False, True, False, False)),  # Radeon RX 6900
        ((110000,), (True, True, False, False)),  # Radeon RX 7900
        ((0,), (None, None, None, None)),  # a processor alone
    ],
)
def test_formats_of_amds_targets(tmp_path: Path, targets: tuple[int, ...], formats: tuple[bool | None, ...]) -> None:
    """https://rocm.docs.amd.com/en/latest/reference/precision-support.html; 90010 is gfx90a."""
    for number, target in enumerate(targets):
        add_file(tmp_path, f"sys/class/kfd/kfd/topology/nodes/{number}/properties", f"gfx_target_version {target}\n")
    assert tuple(AMD.formats(tmp_path).values()) == formats


def test_memory_of_amds_gpus_without_a_file(tmp_path: Path) -> None:
    """Values of an MI250 as rocm-smi prints them (`--showmeminfo vram --json`)."""
    machine_with(tmp_path, "kfd", "dri/renderD128")
    cards = {"card0": {"VRAM Total Memory (B)": "68702699520", "VRAM Total Used Memory (B)": "51527024640"}}
    add_tool(tmp_path / "bin", "rocm-smi", json.dumps(cards), "--showmeminfo vram --json")
    assert AMD.memory(tmp_path) == [68702699520]
    render_node(tmp_path, 129, "0x1002", place="0000:e5:00.0", memory=512 * 2**20)  # graphics of a processor
    assert AMD.memory(tmp_path) == [68702699520]


@pytest.mark.parametrize("under", [None, "gpu_data"])  # ROCm 6, ROCm 7
def test_memory_of_amds_gpus_by_amd_smi(tmp_path: Path, under: str | None) -> None:
    """Values of a MI300X as amd-smi prints them; the second shape from ROCm 7's releases."""
    machine_with(tmp_path, "kfd", "dri/renderD128")
    usage = {"total_vram": {"value": 196592, "unit": "MB"}, "used_vram": {"value": 284, "unit": "MB"}}
    rows = [{"gpu": 0, "mem_usage": usage}]
    text = json.dumps(rows if under is None else {under: rows})
    add_tool(tmp_path / "bin", "amd-smi", text, "metric --mem-usage --json")
    assert AMD.memory(tmp_path) == [196592 * MIB]


def test_tiles_of_intels_cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Level Zero: each tile is a device in the hierarchy FLAT, which is the default, and not in COMPOSITE."""
    root = intel_machine(tmp_path)
    monkeypatch.setenv("ZE_FLAT_DEVICE_HIERARCHY", "COMPOSITE")
    assert vendors.present_devices(root) == (INTEL, 1)
    assert INTEL.memory(root) == [128 * GIB]


def test_accelerators_of_other_makers_are_no_gaudis(tmp_path: Path) -> None:
    machine_with(tmp_path, "accel/accel0")
    add_file(tmp_path, "sys/class/accel/accel0/device/vendor", "0x8086\n")  # the NPU of a laptop
    assert vendors.present_devices(tmp_path) == (None, 0)
    assert vendors.may_have_other_devices(tmp_path)
    assert vendors.present_devices(machine_with(tmp_path / "old", "hl0", "hl1", "hl_controlD0")) == (GAUDI, 2)


def test_the_driver_under_wsl(tmp_path: Path) -> None:
    nvidia_machine(tmp_path)
    (tmp_path / "proc/driver/nvidia/version").unlink()
    assert NVIDIA.driver(tmp_path) == "535.129.03"
