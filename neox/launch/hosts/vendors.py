"""What is known of each vendor's accelerators without torch: device files, variables, and which torch can use them."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from neox.launch.spec import SlotId

_AMD = "0x1002"
_INTEL = "0x8086"
_INTEGRATED_INTEL = "0000:00:02.0"  # where the graphics of Intel's own processors are, on every machine that has them
_LEAST_AMD_MEMORY = 2 * 2**30  # bytes; processors with graphics reserve less for them
# Accelerators that a machine may have beside those that are counted here: NVIDIA's without files of their own and
# without nvidia-smi, Windows' GPUs under WSL2, Jetson, Gaudi, Cambricon, Kunlun. torch may know them.
_OTHER_DEVICES = ("nvidiactl", "dxg", "nvhost-*", "nvgpu/*", "accel/accel*", "hl[0-9]*", "cambricon_dev*", "xpu[0-9]*")


@dataclass(frozen=True)
class Vendor:
    """One vendor's accelerators.

    Attributes:
        name: Name for messages.
        visible: Variables that choose the devices of a process; the first one that is set decides.
        narrowed_by: Variable with which the driver itself hides devices, so that those of `visible` count what it
            leaves, from 0; None if the driver has none.
        for_ranks: Variables that the agent of a host sets for its ranks.
        forwarded: Patterns of the variables that every host gets.
        torch_field: Field of `torch/version.py` that is set in builds for these devices; None if it is an extension.
        extension: Package that lets torch use these devices; None if torch itself does.
        install: What to install for these devices, for messages.
        count: Function that counts the devices below the root directory of a machine.
    """

    name: str
    visible: tuple[str, ...]
    for_ranks: tuple[str, ...]
    forwarded: tuple[str, ...]
    install: str
    count: Callable[[Path], int]
    narrowed_by: str | None = None
    torch_field: str | None = None
    extension: str | None = None

    def visible_devices(self, present: int, environment: Mapping[str, str]) -> tuple[SlotId, ...]:
        """Return the devices that a process may use.

        Args:
            present: Number of the machine's devices.
            environment: Variables of the process.

        Returns:
            The entries of the variable that decides, else the indices of all devices.
        """
        if present == 0:
            return ()
        deciding = self.visible
        if self.narrowed_by is not None and self.narrowed_by in environment:
            present = len(_entries(environment[self.narrowed_by]))
            deciding = self.visible[:1]  # torch reads no other variable then
        for name in deciding:
            if name in environment:
                return _entries(environment[name])
        return tuple(range(present))

    def hides_all(self, environment: Mapping[str, str]) -> bool:
        """Return whether the environment hides all devices, which asks for CPU ranks."""
        if environment.get("DS_ACCELERATOR") == "cpu":
            return True
        return not self.visible_devices(1, environment)


def _entries(text: str) -> tuple[SlotId, ...]:
    """Return the entries of a list of devices: indices, or names such as UUIDs."""
    slots: list[SlotId] = []
    for entry in text.split(","):
        name = entry.strip()
        if name.isdecimal():
            slots.append(int(name))
        elif name not in ("", "-1"):
            slots.append(name)
    return tuple(slots)


# -- how many devices a machine has, from the files in `/dev` and `/sys`


def _device_files(root: Path, pattern: str) -> list[Path]:
    """Return the files of `/dev` whose whole names match a regular expression."""
    directory = root / "dev"
    if not directory.is_dir():
        return []
    return sorted(path for path in directory.iterdir() if re.fullmatch(pattern, path.name))


def _count_nvidia(root: Path) -> int:
    """Count `/dev/nvidia0`, ...; without such files (WSL2, some containers) the GPUs that nvidia-smi lists."""
    files = _device_files(root, r"nvidia\d+")
    if files:
        return len(files)
    if not (root / "proc/driver/nvidia").exists() and not (root / "dev/dxg").exists():
        return 0
    for program in ("nvidia-smi", "/usr/lib/wsl/lib/nvidia-smi"):
        lines = run_tool(program, "-L").splitlines()
        if lines:
            return sum(line.startswith("GPU ") for line in lines)
    return 0


def _render_nodes(root: Path) -> list[Path]:
    """Return the directory in `/sys` of each `/dev/dri/renderD*`."""
    nodes = sorted((root / "dev/dri").glob("renderD*"))
    return [root / "sys/class/drm" / node.name / "device" for node in nodes]


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _count_amd(root: Path) -> int:
    """Count AMD's render nodes on a machine with `/dev/kfd`, without the graphics of processors."""
    if not (root / "dev/kfd").exists():
        return 0
    count = 0
    for device in _render_nodes(root):
        vendor = _read(device / "vendor")
        memory = _read(device / "mem_info_vram_total")  # bytes
        is_processor = memory is not None and memory.isdecimal() and int(memory) < _LEAST_AMD_MEMORY
        if vendor in (_AMD, None) and not is_processor:  # a node that `/sys` says nothing about counts
            count += 1
    return count


def _count_intel(root: Path) -> int:
    """Count Intel's render nodes, without the graphics of processors."""
    count = 0
    for device in _render_nodes(root):
        if _read(device / "vendor") == _INTEL and device.resolve().name != _INTEGRATED_INTEL:
            count += 1
    return count


def _count_ascend(root: Path) -> int:
    return len(_device_files(root, r"davinci\d+"))


NVIDIA = Vendor(
    "NVIDIA",
    visible=("CUDA_VISIBLE_DEVICES",),
    for_ranks=("CUDA_VISIBLE_DEVICES",),
    forwarded=("NCCL_*", "CUDA_*"),
    torch_field="cuda",
    install="torch with CUDA (pytorch.org's index for this driver)",
    count=_count_nvidia,
)
AMD = Vendor(
    "AMD",
    visible=("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    narrowed_by="ROCR_VISIBLE_DEVICES",
    # Both alike: HIP reads the first if it is set, and programs that know only CUDA's read the second.
    for_ranks=("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    forwarded=("NCCL_*", "RCCL_*", "HSA_*", "HIP_*", "ROCM_*", "MIOPEN_*", "GPU_MAX_HW_QUEUES"),
    torch_field="hip",
    install="torch with ROCm (pytorch.org's index for this ROCm)",
    count=_count_amd,
)
ASCEND = Vendor(
    "Ascend",
    visible=("ASCEND_RT_VISIBLE_DEVICES",),
    for_ranks=("ASCEND_RT_VISIBLE_DEVICES",),
    forwarded=("HCCL_*", "ASCEND_*"),
    extension="torch_npu",
    install="torch_npu of the release that fits this CANN and torch",
    count=_count_ascend,
)
INTEL = Vendor(
    "Intel",
    visible=("ZE_AFFINITY_MASK",),
    for_ranks=("ZE_AFFINITY_MASK",),
    forwarded=("CCL_*", "ZE_*", "ZES_*", "SYCL_*", "ONEAPI_*", "I_MPI_*"),
    torch_field="xpu",
    install="torch with XPU (pytorch.org's index for xpu)",
    count=_count_intel,
)
VENDORS = (NVIDIA, AMD, ASCEND, INTEL)
"""All vendors. If a machine has devices of several, those of the first count."""
VISIBLE_VARIABLES = tuple(
    dict.fromkeys(
        name for vendor in VENDORS for name in (*vendor.visible, *vendor.for_ranks, vendor.narrowed_by) if name
    )
)
"""Variables that choose devices. They differ between hosts."""


def present_devices(root: Path = Path("/")) -> tuple[Vendor | None, int]:
    """Return the vendor of this machine's accelerators and their number; None and 0 if none is found."""
    for vendor in VENDORS:
        count = vendor.count(root)
        if count:
            return vendor, count
    return None, 0


def may_have_other_devices(root: Path = Path("/")) -> bool:
    """Return whether there are files of accelerators that `present_devices` does not count."""
    found: list[Path] = []
    for pattern in _OTHER_DEVICES:
        found += (root / "dev").glob(pattern)
    return bool(found)


def devices_of_slots(slots: Sequence[SlotId], visible: Sequence[SlotId]) -> tuple[SlotId, ...] | None:
    """Return the devices that a host's slots mean.

    Args:
        slots: Slots of the host: positions among its visible devices, or else entries of its own list of devices.
        visible: Devices that the host's environment shows.

    Returns:
        The devices; None if there are fewer than slots.
    """
    if all(isinstance(slot, int) and slot < len(visible) for slot in slots):
        return tuple(visible[slot] for slot in slots if isinstance(slot, int))
    if set(slots) <= set(visible):
        return tuple(slots)
    return None


def device_variables(slots: Sequence[SlotId], environment: Mapping[str, str], root: Path = Path("/")) -> dict[str, str]:
    """Return the variables that show a host's ranks the devices of their slots.

    A slot is a position among the devices that this host's own environment shows, because only the host knows which
    devices its scheduler or administrator has given to this job.

    Args:
        slots: Slots of the host.
        environment: Variables of the ranks.
        root: Root directory of the machine.
    """
    vendor, present = present_devices(root)
    if vendor is None:
        if may_have_other_devices(root):
            return {}
        return {"DS_ACCELERATOR": environment.get("DS_ACCELERATOR", "cpu")}  # else DeepSpeed warns that it has no GPU
    if vendor.hides_all(environment):  # they stay hidden
        return {"DS_ACCELERATOR": "cpu", **dict.fromkeys(vendor.for_ranks, "")}
    devices = devices_of_slots(slots, vendor.visible_devices(present, environment))
    if devices is None:  # more ranks than devices: each rank says so, unless it needs no device
        return {}
    return dict.fromkeys(vendor.for_ranks, ",".join(map(str, devices)))


def variables_of_rank(environment: Mapping[str, str], local_rank: int) -> dict[str, str]:
    """Return the variables of one rank, which sees all devices of its host's ranks if a process can use several.

    Args:
        environment: Variables that all ranks of this host share.
        local_rank: Number of the rank on this host.
    """
    variables = {**environment, "LOCAL_RANK": str(local_rank)}
    devices = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if any(device.startswith("MIG-") for device in devices):  # a process can use one instance of a divided GPU
        variables["CUDA_VISIBLE_DEVICES"] = devices[local_rank]
    return variables


# -- whether torch can use them


def torch_problem(environment: Mapping[str, str], root: Path = Path("/")) -> str | None:
    """Return why the installed torch cannot use this machine's accelerators; None if it can, or if they are hidden.

    torch is not imported.

    Args:
        environment: Variables of the ranks.
        root: Root directory of the machine.
    """
    vendor, count = present_devices(root)
    if vendor is None or vendor.hides_all(environment):
        return None
    if vendor.extension is not None:
        if importlib.util.find_spec(vendor.extension) is not None:
            return None
        found = f"{vendor.extension} is not installed"
    else:
        builds = torch_builds()
        if builds is None or vendor.torch_field in builds:
            return None
        found = f"torch {_version('torch')} is built for {', '.join(sorted(builds)) or 'CPUs only'}"
    return (
        f"{count} {vendor.name} devices, but {found}: install {vendor.install}, or set DS_ACCELERATOR=cpu for CPU ranks"
    )


def unused_devices(environment: Mapping[str, str], root: Path = Path("/")) -> str | None:
    """Return which accelerators stay unused in a process whose torch finds no GPU, and why; None if there are none.

    Args:
        environment: Variables of the process.
        root: Root directory of the machine.
    """
    problem = torch_problem(environment, root)
    vendor, count = present_devices(root)
    if problem is not None or vendor is None or vendor.hides_all(environment):
        return problem
    if vendor.torch_field not in ("cuda", "hip"):  # torch.cuda serves both
        why = "which this project cannot train on yet"
    else:
        why = f"which torch {_version('torch')} does not find: look at their driver"
    return f"{count} {vendor.name} devices, {why}; or set DS_ACCELERATOR=cpu for CPU ranks"


def torch_builds() -> set[str] | None:
    """Return which of `cuda`, `hip` and `xpu` the installed torch is built for; None if it is not found."""
    try:
        spec = importlib.util.find_spec("torch")
    except ValueError:  # it is being imported in an unusual way
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    text = _read(Path(spec.submodule_search_locations[0]) / "version.py")
    if text is None:
        return None
    return {match[1] for match in re.finditer(r"^(cuda|hip|xpu)\b[^=\n]*=\s*['\"]", text, re.MULTILINE)}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(unknown)"


def run_tool(program: str, *arguments: str) -> str:
    """Return the output of a vendor's program; an empty text if it does not run."""
    try:
        done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def can_build_kernels(environment: Mapping[str, str], root: Path = Path("/")) -> bool:
    """Return whether torch would find nvcc, with which DeepSpeed builds some of its kernels for NVIDIA's GPUs.

    Args:
        environment: Variables of the ranks.
        root: Root directory of the machine.
    """
    vendor, _ = present_devices(root)
    if vendor is not NVIDIA:
        return True
    homes = [environment[name] for name in ("CUDA_HOME", "CUDA_PATH") if environment.get(name)]
    if homes:
        return Path(homes[0], "bin/nvcc").exists()
    directories = [*environment.get("PATH", os.defpath).split(os.pathsep), str(root / "usr/local/cuda/bin")]
    return shutil.which("nvcc", path=os.pathsep.join(directories)) is not None
