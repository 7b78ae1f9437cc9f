"""What the files and programs of each vendor say about the accelerators of a machine: memory, formats, versions.

What none of them says is unknown (None, or left out), never guessed. Nothing here imports torch.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from neox.devices import FP8_EXPERTS, LEAST_CAPABILITY

UNKNOWN_FORMATS: Mapping[str, bool | None] = MappingProxyType(dict.fromkeys(("bf16", "fp16", "fp8", "fp8_experts")))
_MIB = 2**20
_PATIENCE = 10
"""Seconds that a vendor's program may take."""
AMD_VENDOR = "0x1002"
"""PCI vendor of AMD."""
_LEAST_AMD_MEMORY = 2 * 2**30  # bytes; processors with graphics reserve less for them
_ASCEND = "usr/local/Ascend"  # where Huawei's installers put driver and CANN
# Chips of Ascend's first generation. `910B` alone is one of them; 910B1 to 910B4 are the second, which has bf16.
_FIRST_ASCENDS = ("910A", "910B", "910ProA", "910ProB", "910PremiumA")


def run_tool(program: str, *arguments: str) -> str:
    """Return the output of a vendor's program; an empty text if it does not run, or hangs."""
    try:
        process = subprocess.Popen([program, *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        return ""
    try:
        return process.communicate(timeout=_PATIENCE)[0]
    except subprocess.TimeoutExpired:
        process.kill()  # and not waited for: a call of a driver that hangs cannot be ended
        return ""


def read_text(path: Path) -> str | None:
    """Return the text of a small file without the blanks around it; None if it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


def render_nodes(root: Path) -> list[Path]:
    """Return the directory in `/sys` of each `/dev/dri/renderD*`."""
    nodes = sorted((root / "dev/dri").glob("renderD*"))
    return [root / "sys/class/drm" / node.name / "device" for node in nodes]


def _module_version(root: Path, *modules: str) -> str | None:
    """Return the version of the first kernel module that states one. Modules of the kernel itself state none."""
    for module in modules:
        version = read_text(root / "sys/module" / module / "version")
        if version:
            return version
    return None


def _version_in(path: Path, pattern: str) -> str | None:
    found = re.search(pattern, read_text(path) or "", re.MULTILINE)
    return None if found is None else found[1]


def _bytes_of_mebibytes(words: Iterable[str]) -> list[int]:
    """Return sizes in bytes; words such as `[N/A]` are left out."""
    return [int(word) * _MIB for word in words if word.isdecimal()]


# -- NVIDIA


def _query_nvidia(field: str) -> list[str]:
    """Return a field of every GPU, as nvidia-smi prints it, a line each; also its messages, if it fails."""
    return run_tool("nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits").splitlines()


def nvidia_memory(_root: Path) -> list[int]:
    """Return the memory of each GPU in bytes, as nvidia-smi says. GPUs that share the host's have none (GB10)."""
    return _bytes_of_mebibytes(_query_nvidia("memory.total"))


def nvidia_formats(_root: Path) -> dict[str, bool | None]:
    """Return which formats every GPU multiplies natively, by its compute capability."""
    versions = [float(word) for word in _query_nvidia("compute_cap") if re.fullmatch(r"\d+\.\d+", word)]
    if not versions:
        return dict(UNKNOWN_FORMATS)
    formats = {name: min(versions) >= least for name, least in LEAST_CAPABILITY.items()}
    return {**formats, "fp8_experts": set(versions) == {FP8_EXPERTS}}


def nvidia_driver(root: Path) -> str | None:
    """Return the version of the driver, from its file in `/proc` or from the title of nvidia-smi (WSL2)."""
    version = _version_in(root / "proc/driver/nvidia/version", r"^NVRM version:.*?\s(\d+\.\d[\d.]*)\s")
    if version is None:
        found = re.search(r"Driver Version: (\S+)", run_tool("nvidia-smi"))
        version = None if found is None else found[1]
    return version


def nvidia_library(_root: Path) -> str | None:
    """Return the newest CUDA that the driver serves, from the title of nvidia-smi."""
    found = re.search(r"CUDA Version: (\d[\d.]*)", run_tool("nvidia-smi"))
    return None if found is None else f"CUDA {found[1]}"


# -- AMD


def amd_gpus(root: Path, *, with_processors: bool = True) -> list[tuple[Path, int | None]]:
    """Return AMD's render nodes on a machine with `/dev/kfd`.

    The graphics of a processor have little memory of their own, and take the host's (GTT). They are returned if there
    is no other GPU.

    Args:
        root: Root directory of the machine.
        with_processors: Whether the graphics of processors may be returned, as torch's builds for ROCm find them.

    Returns:
        The directory of each in `/sys`, and its memory in bytes if the driver shows it there.
    """
    if not (root / "dev/kfd").exists():
        return []
    gpus = []
    in_processors = []
    for device in render_nodes(root):
        if read_text(device / "vendor") not in (AMD_VENDOR, None):  # a node that `/sys` says nothing about counts
            continue
        memory = _driver_bytes(device / "mem_info_vram_total")  # partitions of a GPU have no such file
        if memory is None or memory >= _LEAST_AMD_MEMORY:
            gpus.append((device, memory))
        else:
            in_processors.append((device, _driver_bytes(device / "mem_info_gtt_total")))
    return gpus or (in_processors if with_processors else [])


def closed_amd_gpus(root: Path) -> int:
    """Count AMD's render nodes on a machine without `/dev/kfd`, which can draw only; not the graphics of processors."""
    if (root / "dev/kfd").exists():
        return 0
    count = 0
    for device in render_nodes(root):
        memory = _driver_bytes(device / "mem_info_vram_total")
        is_large = memory is None or memory >= _LEAST_AMD_MEMORY
        count += is_large and read_text(device / "vendor") == AMD_VENDOR
    return count


def _driver_bytes(path: Path) -> int | None:
    """Return a number of bytes that amdgpu shows; None if it shows none."""
    text = read_text(path)
    return int(text) if text is not None and text.isdecimal() else None


def amd_memory(root: Path) -> list[int]:
    """Return the memory of each GPU in bytes, as the driver shows it in `/sys`, or else amd-smi or rocm-smi.

    amd-smi: https://rocm.docs.amd.com/projects/amdsmi, `metric --mem-usage --json`; MB are MiB (196,592: MI300X).
    rocm-smi: https://rocm.docs.amd.com/projects/rocm_smi_lib, `--showmeminfo vram --json`.
    """
    sizes = [memory for _, memory in amd_gpus(root) if memory is not None]
    if sizes:
        return sizes
    sizes = _sizes_of_amd_smi(run_tool("amd-smi", "metric", "--mem-usage", "--json"))
    if sizes:
        return sizes
    try:
        cards = json.loads(run_tool("rocm-smi", "--showmeminfo", "vram", "--json"))
    except ValueError:
        return []
    for card in cards.values():
        value = card.get("VRAM Total Memory (B)", "") if isinstance(card, dict) else ""
        if value.isdecimal():
            sizes.append(int(value))
    return sizes


def _sizes_of_amd_smi(text: str) -> list[int]:
    """Return the memory of each GPU in bytes: in a list of GPUs, which ROCm 7 has under `gpu_data`."""
    try:
        found = json.loads(text)
        rows = found["gpu_data"] if isinstance(found, dict) else found
        totals = [row["mem_usage"]["total_vram"] for row in rows]
        return [int(total["value"]) * 2**20 for total in totals if total["unit"] == "MB"]
    except (ValueError, KeyError, TypeError):  # no such tool, or a value is N/A
        return []


def amd_formats(root: Path) -> dict[str, bool | None]:
    """Return which formats every GPU multiplies natively, by its target in `/sys/class/kfd`.

    https://rocm.docs.amd.com/en/latest/reference/precision-support.html: bf16 since CDNA (gfx908) and RDNA 3 (gfx11).
    fp8 as torch multiplies it here, the OCP formats: CDNA 4 (gfx950) and RDNA 4 (gfx12). CDNA 3 (gfx942) has others.
    """
    targets = []
    for node in (root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties"):
        target = _version_in(
            node, r"^gfx_target_version (\d+)$"
        )  # 90402 is gfx942; the second-last two are hexadecimal
        if target is not None and int(target):  # 0 for processors
            targets.append(int(target))
    if not targets:
        return dict(UNKNOWN_FORMATS)
    return {
        "bf16": all(90008 <= target < 100000 or target >= 110000 for target in targets),
        "fp16": all(target >= 90000 for target in targets),
        "fp8": all(90500 <= target < 100000 or target >= 120000 for target in targets),
        "fp8_experts": False,
    }


def amd_driver(root: Path) -> str | None:
    """Return the version of AMD's own kernel module; None for that of the kernel."""
    return _module_version(root, "amdgpu")


def amd_library(root: Path) -> str | None:
    """Return the version of ROCm in its usual place, or where ROCM_PATH says."""
    directory = Path(os.environ.get("ROCM_PATH", root / "opt/rocm"))
    version = read_text(directory / ".info/version")
    return f"ROCm {version}" if version else None


# -- Ascend


def _ascend_chips() -> list[tuple[str, int | None]]:
    """Return name and memory (bytes) of each chip in the table of `npu-smi info`, which has two lines for each.

    The driver keeps 3 to 4 GiB of a chip for itself: what is used, less what the processes use that are listed below.
    torch_npu reports 60.97 of 64 GiB (vllm-project/vllm-ascend#19), and here it is as much or a little less.

    | NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
    | Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
    | 0     910B1               | OK            | 88.4        46                0    / 0             |
    | 0                         | 0000:C1:00.0  | 0           0    / 0          4175 / 65536         |
    ...
    | NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
    | 0       0                 | 48988         | python                   | 13330                   |
    """
    names: list[str] = []
    totals: dict[tuple[str, str], int] = {}  # mebibytes by numbers of NPU and chip
    kept: dict[tuple[str, str], int] = {}
    npu = ""
    for line in run_tool("npu-smi", "info").splitlines():
        cells = line.strip().strip("|").split("|")
        numbers = cells[0].split()
        if not numbers or not numbers[0].isdecimal():
            continue
        if len(cells) == 3 and len(numbers) == 2 and not numbers[1].isdecimal():
            npu = numbers[0]
            names.append(numbers[1].removeprefix("Ascend"))
        elif len(cells) == 3:
            usage = re.search(r"(\d+)\s*/\s*([1-9]\d*)\s*$", cells[2])  # of the last column
            if usage is not None:
                totals[npu, numbers[0]] = int(usage[2])
                kept[npu, numbers[0]] = int(usage[1])
        elif len(cells) > 3 and cells[3].strip().isdecimal() and tuple(numbers) in kept:
            kept[numbers[0], numbers[1]] -= int(cells[3])
    if len(totals) != len(names):
        return [(name, None) for name in names]
    chips: list[tuple[str, int | None]] = []
    for name, (chip, total) in zip(names, totals.items(), strict=True):
        chips.append((name, (total - max(0, kept[chip])) * _MIB))
    return chips


def ascend_memory(_root: Path) -> list[int]:
    """Return the memory of each chip in bytes, as `npu-smi info` says."""
    return [memory for _, memory in _ascend_chips() if memory is not None]


def ascend_formats(_root: Path) -> dict[str, bool | None]:
    """Return which formats every chip multiplies natively, by the names that `npu-smi info` prints.

    torch_npu (`npu_get_soc_version`, `is_bf16_supported`): bf16 since 910B1.
    """
    known: set[bool | None] = set()
    for name, _ in _ascend_chips():
        if name in _FIRST_ASCENDS or name.startswith("310"):
            known.add(False)
        elif re.match(r"910(B\d|_93)", name):
            known.add(True)
        else:
            known.add(None)
    if False in known:
        return {"bf16": False, "fp16": True, "fp8": False, "fp8_experts": False}
    if known == {True}:
        return {"bf16": True, "fp16": True, "fp8": None, "fp8_experts": None}
    return dict(UNKNOWN_FORMATS)


def ascend_driver(root: Path) -> str | None:
    """Return the version of the driver."""
    return _version_in(root / _ASCEND / "driver/version.info", r"^Version\s*=\s*(\S+)")


def ascend_library(root: Path) -> str | None:
    """Return the version of CANN, from the file in which torch_npu's `collect_env` looks for it."""
    home = Path(os.environ.get("ASCEND_HOME_PATH", root / _ASCEND / "ascend-toolkit/latest"))
    for path in sorted(home.glob("*/ascend_*_install.info")) + sorted(home.glob("ascend_*_install.info")):
        version = _version_in(path, r"^version\s*=\s*(\S+)")
        if version is not None:
            return f"CANN {version}"
    return None


# -- Intel


def intel_tiles(device: Path) -> int:
    """Return how many devices a card is by default: one for each of its tiles (Level Zero's hierarchy FLAT).

    Args:
        device: Directory of its render node in `/sys`. Below it are a directory for each tile (driver xe), or one for
            each GT (driver i915), which is a tile on cards for data centres and alone on others.
    """
    if os.environ.get("ZE_FLAT_DEVICE_HIERARCHY", "FLAT").upper() == "COMPOSITE":
        return 1
    tiles = list(device.glob("tile[0-9]*")) or list(device.glob("drm/card*/gt/gt[0-9]*"))
    return max(1, len(tiles))


def intel_memory(root: Path) -> list[int]:
    """Return the memory of each card in bytes, as xpu-smi says, divided among its tiles.

    https://intel.github.io/xpumanager: `xpu-smi discovery --dump 16` (Memory Physical Size).
    """
    tiles = max((intel_tiles(device) for device in render_nodes(root)), default=1)
    sizes = re.findall(r"(\d+(?:\.\d+)?) MiB", run_tool("xpu-smi", "discovery", "--dump", "16"))
    return [int(float(size) * _MIB) // tiles for size in sizes if float(size)]  # 0 for graphics of processors


def intel_driver(root: Path) -> str | None:
    """Return the version of Intel's own kernel module; None for those of the kernel."""
    return _module_version(root, "xe", "i915")


# -- Gaudi


def _query_gaudi(field: str) -> list[str]:
    """Return a field of every device, as hl-smi prints it.

    https://docs.habana.ai/en/latest/Management_and_Monitoring/Embedded_System_Tools_Guide/
    """
    return run_tool("hl-smi", "-Q", field, "-f", "csv,noheader,nounits").split()


def gaudi_memory(_root: Path) -> list[int]:
    """Return the memory of each device in bytes, as hl-smi says."""
    return _bytes_of_mebibytes(_query_gaudi("memory.total"))


def gaudi_driver(root: Path) -> str | None:
    """Return the version of the driver."""
    version = _module_version(root, "habanalabs")
    if version is None:
        version = next(iter(_query_gaudi("driver_version")), None)
    return version
