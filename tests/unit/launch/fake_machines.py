"""Machines with the device files and programs of each vendor, as directories and scripts."""

from __future__ import annotations

from pathlib import Path


def machine_with(root: Path, *files: str) -> Path:
    """Make a root directory with these files below /dev."""
    for file in files:
        (root / "dev" / file).parent.mkdir(parents=True, exist_ok=True)
        (root / "dev" / file).touch()
    return root


def add_file(root: Path, path: str, text: str) -> None:
    """Add a file below the root directory."""
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def render_node(root: Path, number: int, vendor: str, *, place: str, memory: int | None = None, tiles: int = 0) -> None:
    """Add a render node as the kernel shows it.

    Args:
        root: Root directory.
        number: Number in `/dev/dri`.
        vendor: PCI vendor.
        place: PCI address.
        memory: Bytes, as amdgpu shows them.
        tiles: Tiles, as xe shows them.
    """
    machine_with(root, f"dri/renderD{number}")
    device = root / "sys/devices/pci" / place
    device.mkdir(parents=True)
    (device / "vendor").write_text(f"{vendor}\n")
    if memory is not None:
        (device / "mem_info_vram_total").write_text(f"{memory}\n")
    for tile in range(tiles):
        (device / f"tile{tile}").mkdir()
    link = root / f"sys/class/drm/renderD{number}/device"
    link.parent.mkdir(parents=True)
    link.symlink_to(device)


def add_tool(directory: Path, name: str, output: str, arguments: str = "*") -> None:
    """Add a vendor's program to a directory of `PATH`.

    Args:
        directory: The directory.
        name: Name of the program.
        output: What it prints.
        arguments: The arguments with which it prints that; a pattern of the shell.
    """
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / name
    if not file.exists():
        file.write_text("#!/bin/sh\n")
        file.chmod(0o755)
    pattern = arguments.replace(" ", "\\ ") or "''"
    with file.open("a") as script:
        script.write(f"case \"$*\" in\n{pattern})\ncat <<'END'\n{output}\nEND\nexit;;\nesac\n")


def nvidia_machine(root: Path, gpus: int = 8) -> Path:
    """Make a host of A100s; texts of nvidia-smi and `/proc` as in NVIDIA's driver documentation."""
    machine_with(root, *(f"nvidia{number}" for number in range(gpus)), "nvidiactl", "nvidia-uvm")
    line = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023\nGCC version"
    add_file(root, "proc/driver/nvidia/version", line)
    title = "| NVIDIA-SMI 535.129.03             Driver Version: 535.129.03   CUDA Version: 12.2     |"
    add_tool(root / "bin", "nvidia-smi", "\n".join(["81920"] * gpus), "*memory.total*")
    add_tool(root / "bin", "nvidia-smi", "\n".join(["8.0"] * gpus), "*compute_cap*")
    add_tool(root / "bin", "nvidia-smi", title, "")
    return root


def amd_machine(root: Path) -> Path:
    """Make a node of Frontier: 8 dies of 4 MI250X, and the display of a server.

    Memory of a die as rocm-smi reports it for an MI250: 68702699520 bytes.
    """
    machine_with(root, "kfd")
    for number in range(8):
        render_node(root, 128 + number, "0x1002", place=f"0000:{number:02x}:00.0", memory=68702699520)
        properties = "cpu_cores_count 0\nsimd_count 440\ngfx_target_version 90010\nvendor_id 4098"
        add_file(root, f"sys/class/kfd/kfd/topology/nodes/{number + 4}/properties", properties)
    properties = "cpu_cores_count 16\nsimd_count 0\ngfx_target_version 0\nvendor_id 0"
    add_file(root, "sys/class/kfd/kfd/topology/nodes/0/properties", properties)
    render_node(root, 136, "0x1a03", place="0000:22:00.0")
    add_file(root, "sys/module/amdgpu/version", "6.8.5\n")
    add_file(root, "opt/rocm/.info/version", "6.2.0-66\n")
    return root


ASCEND_TABLE = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 23.0.rc2                 Version: 23.0.rc2                                             |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 0     910B1               | OK            | 88.4        46                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          4175 / 65536         |
+===========================+===============+====================================================+
| 1     910B1               | OK            | 92.1        47                0    / 0             |
| 0                         | 0000:01:00.0  | 0           0    / 0          17505/ 65536         |
+===========================+===============+====================================================+
+---------------------------+---------------+----------------------------------------------------+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
| No running processes found in NPU 0                                                            |
| 1       0                 | 48988         | python                   | 13330                   |
"""
"""`npu-smi info` on a host of 910B, from https://arthurchiao.art/blog/gpu-advanced-notes-2-zh/, and a process."""


def ascend_machine(root: Path) -> Path:
    """Make a host of 8 Ascend 910B (`/dev/davinci*` as in the report named at `ASCEND_TABLE`)."""
    machine_with(root, *(f"davinci{number}" for number in range(8)), "davinci_manager", "devmm_svm", "hisi_hdc")
    add_tool(root / "bin", "npu-smi", ASCEND_TABLE, "info")
    add_file(root, "usr/local/Ascend/driver/version.info", "Version=23.0.rc2\nascendhal_version=7.1.0\n")
    info = "package_name=Ascend-cann-toolkit\nversion=8.0.RC1\ninnerversion=V100R001C17SPC001B225\n"
    add_file(root, "usr/local/Ascend/ascend-toolkit/latest/aarch64-linux/ascend_toolkit_install.info", info)
    return root


def gaudi_machine(root: Path) -> Path:
    """Make a host of two Gaudi 2; queries of hl-smi as in docs.habana.ai, System Management Interface Tool."""
    machine_with(root, "accel/accel0", "accel/accel1", "accel/accel_controlD0")
    for number in range(2):
        add_file(root, f"sys/class/accel/accel{number}/device/vendor", "0x1da3\n")
    add_tool(root / "bin", "hl-smi", "98304\n98304", "-Q memory.total*")
    add_tool(root / "bin", "hl-smi", "1.16.0-94aac46\n1.16.0-94aac46", "-Q driver_version*")
    return root


def intel_machine(root: Path) -> Path:
    """Make a host with a Max 1550 of two tiles and the graphics of its processor.

    xpu-smi prints sizes as in its source (xpumanager, cmdDiscovery::memoryPhysicalSize) and 0 for the processor's.
    """
    render_node(root, 128, "0x8086", place="0000:00:02.0")
    render_node(root, 129, "0x8086", place="0000:29:00.0", tiles=2)
    add_tool(root / "bin", "xpu-smi", "Memory Physical Size\n0.00 MiB\n131072.00 MiB", "discovery --dump 16")
    add_file(root, "sys/module/i915/version", "backported from (1.24.2.17)\n")
    return root
