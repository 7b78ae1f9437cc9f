"""How a machine shows the accelerators of each vendor, without torch, and which torch can use which.

Device files, variables that choose devices, those that other hosts get, and functions that ask for memory, formats and
versions (`neox.launch.hosts.device_facts`). What the devices can do is in the row of `neox.devices.DEVICES` that each
vendor refers to.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neox.devices import DEVICES, DeviceFamily
from neox.launch.hosts import device_facts
from neox.launch.hosts.device_facts import (
    UNKNOWN_FORMATS,
    amd_gpus,
    closed_amd_gpus,
    intel_tiles,
    read_text,
    render_nodes,
    run_tool,
)
from neox.launch.spec import SlotId

_INTEL = "0x8086"
_HABANA = "0x1da3"
_INTEGRATED_INTEL = "0000:00:02.0"  # where the graphics of Intel's own processors are, on every machine that has them
_CPU_RANKS = "set DS_ACCELERATOR=cpu for CPU ranks"
_BUILD_NAMES = {"cuda": "CUDA", "hip": "ROCm", "xpu": "XPU"}  # fields of torch/version.py
# Accelerators that a machine may have beside those that are counted here: NVIDIA's without files of their own and
# without nvidia-smi, Windows' GPUs under WSL2, Jetson, other makers' of the kernel's class `accel`, Cambricon, Kunlun.
# torch may know them.
_OTHER_DEVICES = ("nvidiactl", "dxg", "nvhost-*", "nvgpu/*", "accel/accel*", "cambricon_dev*", "xpu[0-9]*")


def _no_sizes(_root: Path) -> list[int]:
    return []


def _no_formats(_root: Path) -> dict[str, bool | None]:
    return dict(UNKNOWN_FORMATS)


def _nothing(_root: Path) -> str | None:
    return None


@dataclass(frozen=True, kw_only=True)
class Vendor:
    """One vendor's accelerators.

    The functions get the root directory of the machine. What they do not find is unknown: no sizes, None.

    Attributes:
        family: Kind of device, a key of `DEVICES`.
        visible: Variables that choose the devices of a process; the first one that is set decides.
        narrowed_by: Variable with which the driver itself hides devices, so that those of `visible` count what it
            leaves, from 0; None if the driver has none.
        for_ranks: Variables that the agent of a host sets for its ranks.
        ascending: Whether these lists must be in ascending order.
        entry: Regular expression of an entry of these lists that the driver understands.
        counts_from_all: Whether each index of these lists must be less than the number of devices.
        forwarded: Patterns of the variables that every host gets.
        interface: Variable that names the network interface of its collectives; None if that is gloo's.
        torch_field: Field of `torch/version.py` that is set in builds for these devices; None if it is an extension.
        extension: Package that lets torch use these devices; None if torch itself does.
        install: What to install for these devices, for messages.
        status_command: Command that shows whether the driver finds the devices, for messages.
        count: Counts the devices.
        memory: Returns the memory of each device in bytes.
        formats: Returns which of `bf16`, `fp16` and `fp8` every device multiplies natively.
        driver: Returns the version of the driver.
        library: Returns name and version of the vendor's libraries.
    """

    family: DeviceFamily
    visible: tuple[str, ...]
    for_ranks: tuple[str, ...]
    forwarded: tuple[str, ...]
    install: str
    status_command: str
    count: Callable[[Path], int]
    memory: Callable[[Path], list[int]] = _no_sizes
    formats: Callable[[Path], dict[str, bool | None]] = _no_formats
    driver: Callable[[Path], str | None] = _nothing
    library: Callable[[Path], str | None] = _nothing
    interface: str | None = None
    narrowed_by: str | None = None
    ascending: bool = False
    entry: str = r"\d+"
    counts_from_all: bool = False
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
        present, name = self._deciding(present, environment)
        if name is not None:
            return _entries(environment[name])
        return tuple(range(present))

    def _deciding(self, present: int, environment: Mapping[str, str]) -> tuple[int, str | None]:
        """Return the number of devices that the driver leaves, and the variable that chooses among them, if one is set.

        torch reads no other variable than the first if the driver hides devices.
        """
        if self.narrowed_by is not None and self.narrowed_by in environment:
            first = self.visible[0]
            return len(_entries(environment[self.narrowed_by])), first if first in environment else None
        return present, next((name for name in self.visible if name in environment), None)

    def list_problem(self, present: int, environment: Mapping[str, str]) -> str | None:
        """Return what the driver does not understand in the list that chooses devices; None if nothing.

        Drivers do not say so: they drop the entry, those behind it, or all (CUDA's programming guide, "CUDA environment
        variables"; vllm-project/vllm-ascend PR 10227).

        Args:
            present: Number of the machine's devices.
            environment: Variables of the process.
        """
        present, name = self._deciding(present, environment)
        if name is None:
            return None
        entries = _entries(environment[name])
        why = None
        for entry in entries:
            if not re.fullmatch(self.entry, str(entry)):
                why = f"`{entry}` is none of its entries: give a list such as 0,1"
            elif self.counts_from_all and isinstance(entry, int) and entry >= present:
                why = f"{entry} is none of the {present} devices, which count from 0"
        kinds = {"index" if isinstance(entry, int) else entry[:4] for entry in entries}
        if self.counts_from_all and len(kinds) > 1:
            why = "indices and names of several kinds do not go together"
        if len(set(entries)) < len(entries):
            why = "a device is named twice, and then none is used"
        return None if why is None else f"{name}={environment[name]}: {why}"

    @property
    def name(self) -> str:
        """Name for messages."""
        return DEVICES[self.family].vendor

    @property
    def accelerator(self) -> str:
        """DeepSpeed's name for the devices (`DS_ACCELERATOR`), which is their type in torch."""
        return DEVICES[self.family].torch_type

    def hides_all(self, environment: Mapping[str, str]) -> bool:
        """Return whether the environment hides all devices, which asks for CPU ranks."""
        if environment.get("DS_ACCELERATOR") == "cpu":
            return True
        return not self.visible_devices(1, environment)

    def variables(self, devices: Sequence[SlotId]) -> dict[str, str]:
        """Return the variables that show ranks these devices."""
        if self.ascending:
            devices = sorted(devices, key=lambda device: (isinstance(device, str), device))
        return dict.fromkeys(self.for_ranks, ",".join(map(str, devices)))


def _entries(text: str) -> tuple[SlotId, ...]:
    """Return the entries of a list of devices: indices, or names such as UUIDs.

    A negative index ends the list. Slurm writes `NoDevFiles` for a job that was given none.
    """
    slots: list[SlotId] = []
    for entry in text.split(","):
        name = entry.strip()
        if name.startswith("-") or name == "NoDevFiles":
            break
        if name.isdecimal():
            slots.append(int(name))
        elif name:
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


def _count_amd(root: Path) -> int:
    return len(amd_gpus(root, with_processors="hip" in (torch_builds() or {})))


def _count_intel(root: Path) -> int:
    """Count Intel's render nodes; the tiles of a card are devices of their own.

    The graphics of a processor count where there is no card, and torch is built for them.
    """
    count = 0
    in_processors = 0
    for device in render_nodes(root):
        if read_text(device / "vendor") != _INTEL:
            continue
        if device.resolve().name == _INTEGRATED_INTEL:
            in_processors += 1
        else:
            count += intel_tiles(device)
    return count or (in_processors if "xpu" in (torch_builds() or {}) else 0)


def _count_ascend(root: Path) -> int:
    return len(_device_files(root, r"davinci\d+"))


def _count_gaudi(root: Path) -> int:
    """Count `/dev/accel/accel0`, ... of this maker, or `/dev/hl0`, ... of older drivers."""
    count = 0
    for file in (root / "dev/accel").glob("accel[0-9]*"):
        count += read_text(root / "sys/class/accel" / file.name / "device/vendor") == _HABANA
    return count or len(_device_files(root, r"hl\d+"))


NVIDIA = Vendor(
    family="cuda",
    visible=("CUDA_VISIBLE_DEVICES",),
    for_ranks=("CUDA_VISIBLE_DEVICES",),
    entry=r"\d+|GPU-.+|MIG-.+",
    counts_from_all=True,
    forwarded=("NCCL_*", "CUDA_*"),
    torch_field="cuda",
    install="torch with CUDA (pytorch.org's index for this driver)",
    status_command="nvidia-smi",
    interface="NCCL_SOCKET_IFNAME",
    count=_count_nvidia,
    memory=device_facts.nvidia_memory,
    formats=device_facts.nvidia_formats,
    driver=device_facts.nvidia_driver,
    library=device_facts.nvidia_library,
)
AMD = Vendor(
    family="rocm",
    visible=("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    narrowed_by="ROCR_VISIBLE_DEVICES",
    # Both alike: HIP reads the first if it is set, and programs that know only CUDA's read the second.
    for_ranks=("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    entry=r"\d+|GPU-.+",
    counts_from_all=True,
    forwarded=("NCCL_*", "RCCL_*", "HSA_*", "HIP_*", "ROCM_*", "MIOPEN_*", "GPU_MAX_HW_QUEUES"),
    torch_field="hip",
    install="torch with ROCm (requirements/requirements-rocm.txt)",
    status_command="rocm-smi",
    interface="NCCL_SOCKET_IFNAME",
    count=_count_amd,
    memory=device_facts.amd_memory,
    formats=device_facts.amd_formats,
    driver=device_facts.amd_driver,
    library=device_facts.amd_library,
)
ASCEND = Vendor(
    family="npu",
    visible=("ASCEND_RT_VISIBLE_DEVICES",),
    for_ranks=("ASCEND_RT_VISIBLE_DEVICES",),
    ascending=True,  # else torch_npu counts no device
    forwarded=(
        "HCCL_*",
        "ASCEND_*",
        "ACL_*",
        "RANK_TABLE_FILE",
        "TASK_QUEUE_ENABLE",
        "CPU_AFFINITY_CONF",
        "INF_NAN_MODE_*",
    ),
    extension="torch_npu",
    install="torch_npu of the release that fits this CANN and torch (requirements/requirements-ascend.txt)",
    status_command="npu-smi info",
    interface="HCCL_SOCKET_IFNAME",
    count=_count_ascend,
    memory=device_facts.ascend_memory,
    formats=device_facts.ascend_formats,
    driver=device_facts.ascend_driver,
    library=device_facts.ascend_library,
)
GAUDI = Vendor(
    family="hpu",
    visible=("HABANA_VISIBLE_MODULES",),
    for_ranks=("HABANA_VISIBLE_MODULES",),
    forwarded=("HABANA_*", "HCL_*", "HCCL_*", "PT_HPU_*"),
    extension="habana_frameworks",
    install="habana-torch-plugin of the release that fits this driver and torch",
    status_command="hl-smi",
    interface="HCCL_SOCKET_IFNAME",
    count=_count_gaudi,
    memory=device_facts.gaudi_memory,
    driver=device_facts.gaudi_driver,
)
INTEL = Vendor(
    family="xpu",
    visible=("ZE_AFFINITY_MASK",),
    for_ranks=("ZE_AFFINITY_MASK",),
    entry=r"\d+(\.\d+)?",  # a card, or a tile of it
    forwarded=("CCL_*", "ZE_*", "ZES_*", "SYCL_*", "ONEAPI_*", "I_MPI_*"),
    torch_field="xpu",
    install="torch with XPU (requirements/requirements-xpu.txt)",
    status_command="xpu-smi discovery",
    count=_count_intel,
    memory=device_facts.intel_memory,
    driver=device_facts.intel_driver,
)
VENDORS = (NVIDIA, AMD, ASCEND, GAUDI, INTEL)
"""All vendors. If a machine has devices of several, and torch can use each or none, those of the first count."""
VISIBLE_VARIABLES = tuple(
    dict.fromkeys(
        name for vendor in VENDORS for name in (*vendor.visible, *vendor.for_ranks, vendor.narrowed_by) if name
    )
)
"""Variables that choose devices. They differ between hosts."""


def interface_variable(vendor_name: str | None) -> str:
    """Return the variable that names the network interface of a host's collectives.

    Args:
        vendor_name: Vendor of the host's accelerators, None for CPU ranks.
    """
    for vendor in VENDORS:
        if vendor.name == vendor_name and vendor.interface is not None:
            return vendor.interface
    return "GLOO_SOCKET_IFNAME"


def present_devices(root: Path = Path("/")) -> tuple[Vendor | None, int]:
    """Return the vendor of this machine's accelerators and their number; None and 0 if none is found.

    If there are several vendors' devices, such as a display's, those that the installed torch can use count.
    """
    found: list[tuple[Vendor, int]] = []
    for vendor in VENDORS:
        count = vendor.count(root)
        if count:
            found.append((vendor, count))
    if not found:
        return None, 0
    if len(found) > 1:
        for vendor, count in found:
            if _lacking(vendor) is None:
                return vendor, count
    return found[0]


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
    # DeepSpeed would choose by what is installed, not by what this machine has.
    accelerator = environment.get("DS_ACCELERATOR", vendor.accelerator)
    return {"DS_ACCELERATOR": accelerator, **vendor.variables(devices)}


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
    if vendor is None and "hip" in (torch_builds() or {}) and not AMD.hides_all(environment):
        return _closed_amd_problem(root)
    if vendor is None or vendor.hides_all(environment):
        return None
    unread = vendor.list_problem(count, environment)
    if unread is not None:
        return f"{count} {vendor.name} devices, but {unread}"
    lacking = _lacking(vendor)
    if lacking is None:
        return None
    return f"{count} {vendor.name} devices, but {lacking}: install {vendor.install}, or {_CPU_RANKS}"


def unused_devices(environment: Mapping[str, str], root: Path = Path("/")) -> str | None:
    """Return which accelerators stay unused in a process whose torch finds none, and why; None if there are none.

    Args:
        environment: Variables of the process.
        root: Root directory of the machine.
    """
    problem = torch_problem(environment, root)
    vendor, count = present_devices(root)
    if problem is not None or vendor is None or vendor.hides_all(environment):
        return problem
    torch = f"torch {_version('torch')} ({torch_build()})"
    why = f"which {torch} does not find: does `{vendor.status_command}` show them?"
    if vendor is AMD and not os.access(root / "dev/kfd", os.R_OK | os.W_OK):
        why = "whose /dev/kfd this account may not open: add it to the groups `render` and `video`"
    return f"{count} {vendor.name} devices, {why}; or {_CPU_RANKS}"


def _closed_amd_problem(root: Path) -> str | None:
    """Return that AMD's GPUs are shown to this machine, a container, for graphics only; None if they are not."""
    count = closed_amd_gpus(root)
    if not count:
        return None
    return f"{count} AMD devices, but no /dev/kfd: start the container with --device=/dev/kfd too, or {_CPU_RANKS}"


def _lacking(vendor: Vendor) -> str | None:
    """Return what the installed torch lacks to use a vendor's devices; None if nothing, or if torch is not found."""
    if vendor.extension is not None:
        if importlib.util.find_spec(vendor.extension) is None:
            return f"{vendor.extension} is not installed"
        return _wrong_release(vendor.extension)
    builds = torch_builds()
    if builds is None or vendor.torch_field in builds:
        return None
    return f"torch {_version('torch')} is built for {torch_build() or 'CPUs'} only"


def _wrong_release(extension: str) -> str | None:
    """Return that an extension whose versions are torch's (torch_npu) is made for another torch; None if it is not."""
    if extension != "torch_npu":
        return None
    own = re.match(r"\d+\.\d+", _version(extension))
    torch = re.match(r"\d+\.\d+", _version("torch"))
    if own is None or torch is None or own[0] == torch[0]:
        return None
    return f"{extension} {_version(extension)} does not fit torch {_version('torch')}"


def torch_builds() -> dict[str, str] | None:
    """Return for which of `cuda`, `hip` and `xpu` the installed torch is built, with versions; None without torch."""
    try:
        spec = importlib.util.find_spec("torch")
    except ValueError:  # it is being imported in an unusual way
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    text = read_text(Path(spec.submodule_search_locations[0]) / "version.py")
    if text is None:
        return None
    fields = re.finditer(r"^(cuda|hip|xpu)\b[^=\n]*=\s*['\"]([^'\"]*)", text, re.MULTILINE)
    return {match[1]: match[2] for match in fields}


def torch_build() -> str | None:
    """Return what the installed torch is built for, with its extensions, as `CUDA 12.8`; None for CPUs, or no torch."""
    names = []
    for field, build in (torch_builds() or {}).items():
        names.append(f"{_BUILD_NAMES[field]} {build}")
    for vendor in VENDORS:
        if vendor.extension is not None and importlib.util.find_spec(vendor.extension) is not None:
            names.append(f"{vendor.extension} {_version(vendor.extension)}")
    return ", ".join(names) or None


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version  # takes time, and a dry run needs no version

    try:
        return version(package)
    except PackageNotFoundError:
        return "(unknown)"


def accelerator_facts(root: Path = Path("/")) -> dict[str, Any]:
    """Return what people ask first about a machine's accelerators, whatever the environment shows of them.

    Returns:
        `vendor`, `driver`, `library` and `torch_build`; None for what is not known.
    """
    vendor, _ = present_devices(root)
    facts: dict[str, Any] = {"vendor": None, "driver": None, "library": None, "torch_build": torch_build()}
    if vendor is not None:
        facts |= {"vendor": vendor.name, "driver": vendor.driver(root), "library": vendor.library(root)}
    return facts


def refused_backend(backend: str, vendor: Vendor) -> str | None:
    """Return why a vendor's accelerators cannot communicate over a backend of torch.distributed; None if they can.

    Args:
        backend: Value of `distributed_backend`.
        vendor: The vendor.
    """
    collectives = DEVICES[vendor.family].collectives
    if backend in ("auto", *collectives):
        return None
    return f"{backend} does not serve {vendor.name} devices: set {collectives[0]}, or auto"


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
