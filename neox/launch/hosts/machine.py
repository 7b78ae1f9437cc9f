"""What this machine has: accelerators, free memory, number formats it computes natively, and free ports."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from neox.devices import DeviceFamily
from neox.launch.hosts.vendors import NVIDIA, Vendor, present_devices
from neox.launch.spec import SlotId

# Flags of /proc/cpuinfo. One of them is enough.
_CPU_FLAGS = {"bf16": {"avx512_bf16", "amx_bf16", "bf16"}, "fp16": {"avx512_fp16", "amx_fp16", "asimdhp"}}
_PRODUCT_SIZE = 192  # rows and columns of a matrix
_PRODUCT_ATTEMPTS = 20  # within milliseconds, so that at least one is not interrupted


# -- accelerators


def visible_accelerators(environment: Mapping[str, str] | None = None) -> tuple[SlotId, ...]:
    """Return the accelerators that this process may use.

    Args:
        environment: Variables that choose among them (`neox.launch.hosts.vendors`); those of this process if left out.

    Returns:
        The entries of the variable that chooses, such as `CUDA_VISIBLE_DEVICES`, else the index of every accelerator of
        this machine. None under `DS_ACCELERATOR=cpu`.
    """
    if environment is None:
        environment = os.environ
    vendor, present = present_devices()
    if vendor is None or vendor.hides_all(environment):
        return ()
    return vendor.visible_devices(present, environment)


def count_accelerators() -> int:
    """Return the number of accelerators that this process may use."""
    return len(visible_accelerators())


def smallest_memory() -> int | None:
    """Return the memory of this machine's smallest accelerator in bytes, or None if its vendor's files do not say.

    They say that of whole GPUs, and not of MIG's instances.
    """
    vendor, present = present_devices()
    if vendor is None:
        return None
    if any(str(device).startswith("MIG-") for device in vendor.visible_devices(present, os.environ)):
        return None
    return min(vendor.memory(Path("/")), default=None)


# -- memory


def available_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Return the bytes of main memory that new processes may take, within the limits of this process's control groups.

    Args:
        proc: Mount point of the kernel's `/proc`.
        cgroups: Mount point of the control groups, of version 1 or 2.

    Returns:
        The bytes; None if the kernel does not say.
    """
    try:
        meminfo = (proc / "meminfo").read_text()
        groups = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return None
    limits = []
    found = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo, re.MULTILINE)
    if found is not None:
        limits.append(int(found[1]) * 1024)
    for line in groups:
        limits += _free_in_groups(line, cgroups)
    return min(limits, default=None)


def _free_in_groups(line: str, cgroups: Path) -> Iterator[int]:
    """Yield the free bytes of a control group and of the groups around it that have a limit.

    Args:
        line: Line of `/proc/self/cgroup`, `number:controllers:path`. Version 2 has no controllers.
        cgroups: Mount point of the control groups.
    """
    _, controllers, path = line.split(":", 2)
    if not controllers:
        for mounted in (cgroups, cgroups / "unified"):
            yield from _free_up_to_root(mounted, path, "memory.max", "memory.current", "inactive_file")
    elif "memory" in controllers.split(","):
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        yield from _free_up_to_root(cgroups / "memory", path, *names)


def _free_up_to_root(mounted: Path, path: str, limit: str, usage: str, reclaimable: str) -> Iterator[int]:
    """Yield the bytes that a control group and each group around it can still take, if the group has a limit.

    Args:
        mounted: Mount point of the control groups.
        path: Path of the group below the mount point, with a slash in front.
        limit: Name of the file with a group's limit.
        usage: Name of the file with a group's usage.
        reclaimable: Name of the line of `memory.stat` with the part of the usage that the kernel gives back.
    """
    innermost = mounted / path.lstrip("/")
    for group in (innermost, *innermost.parents):
        try:
            free = int((group / limit).read_text()) - int((group / usage).read_text())
            statistics = (group / "memory.stat").read_text()
        except (OSError, ValueError):  # no limit: no such file, or the word `max`
            continue
        match = re.search(rf"^{reclaimable} (\d+)", statistics, re.MULTILINE)
        if match is not None:
            free += int(match[1])
        yield max(1, free)


def memory_kills(vmstat: Path = Path("/proc/vmstat")) -> int | None:
    """Return how many processes the kernel has killed for lack of memory since it started; None if it hides that."""
    try:
        match = re.search(r"^oom_kill (\d+)", vmstat.read_text(), re.MULTILINE)
    except OSError:
        return None
    if match is None:
        return None
    return int(match[1])


# -- number formats


def _used_vendor(environment: Mapping[str, str] | None = None) -> Vendor | None:
    """Return the vendor of the accelerators that ranks of this machine use; None for CPU ranks."""
    vendor, _ = present_devices()
    if vendor is None or vendor.hides_all(os.environ if environment is None else environment):
        return None
    return vendor


def device_family() -> DeviceFamily:
    """Return the kind of device that ranks of this machine use, a key of `neox.devices.DEVICES`."""
    vendor = _used_vendor()
    return "cpu" if vendor is None else vendor.family


def native_formats(
    cpuinfo: Path = Path("/proc/cpuinfo"), environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return which number formats the devices of this machine multiply natively.

    Args:
        cpuinfo: The kernel's description of the CPU, which is read if this process sees no GPU.
        environment: Variables of the ranks; those of this process if left out.

    Returns:
        `devices`: "CPU", "GPUs" (NVIDIA's) or a text such as "Ascend devices"; `bf16`, `fp16`, `fp8`: True or False,
        None if it is not known (`fp8` of CPUs).
        `family`: kind of device a key of `neox.devices.DEVICES`.
        `bf16_is_slow`: True for CPUs that multiply bf16 natively, but train slower in it than in fp32.
    """
    vendor = _used_vendor(environment)
    if vendor is None:
        return {"devices": "CPU", "family": "cpu", **_formats_of_cpu(cpuinfo)}
    name = "GPUs" if vendor is NVIDIA else f"{vendor.name} devices"
    return {"devices": name, "family": vendor.family, **vendor.formats(Path("/")), "bf16_is_slow": False}


def _formats_of_cpu(cpuinfo: Path) -> dict[str, bool | None]:
    unknown: dict[str, bool | None] = {"bf16": None, "fp16": None, "fp8": None, "bf16_is_slow": False}
    try:
        text = cpuinfo.read_text()
    except OSError:
        return unknown
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    if found is None:
        return unknown
    flags = set(found[1].split())
    formats = {name: bool(native & flags) for name, native in _CPU_FLAGS.items()}
    return unknown | formats | {"bf16_is_slow": _trains_slowly_in_bf16(text, flags)}


def _trains_slowly_in_bf16(cpuinfo: str, flags: set[str]) -> bool:
    """Return whether a CPU that has bf16 instructions is of a kind that trains faster in fp32.

    Measured in the quickstart, in tokens/s: Intel with AVX512-BF16 and without AMX 2,200 in bf16 and 3,400 in fp32;
    AMX, and AMD's Zen 4 with AVX512-BF16, are faster in bf16 (1,580 and 840; 776 and 473 on a larger network).
    """
    is_intel = re.search(r"^vendor_id\s*:\s*GenuineIntel", cpuinfo, re.MULTILINE) is not None
    return is_intel and "avx512_bf16" in flags and "amx_bf16" not in flags


# -- the processor


def multiplies_exactly() -> bool:
    """Return whether the processor computes a product of two matrices of small whole numbers exactly, in fp64."""
    import numpy as np  # takes time, and a dry run checks no host

    rows = np.arange(_PRODUCT_SIZE)[:, None]
    columns = np.arange(_PRODUCT_SIZE)[None, :]
    left = (7 * rows + 3 * columns) % 101 - 50
    right = (5 * rows * columns) % 103 - 51
    expected = left @ right  # of whole numbers, by other instructions
    return bool((left.astype(np.float64) @ right.astype(np.float64) == expected).all())


def product_seconds() -> float:
    """Return the seconds that the processor takes for a small product in fp64: the least of several attempts."""
    import numpy as np  # takes time, and a dry run checks no host

    factor = np.ones((_PRODUCT_SIZE, _PRODUCT_SIZE))
    attempts = []
    for _ in range(_PRODUCT_ATTEMPTS):
        started = time.perf_counter()
        factor @ factor
        attempts.append(time.perf_counter() - started)
    return min(attempts)


# -- ports


def port_problem(port: int) -> str | None:
    """Return why a TCP port of this machine cannot be listened on, or None if it can."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            return error.strerror or str(error)
    return None
