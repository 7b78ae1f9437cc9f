"""Counting accelerators without torch."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

from neox.launch.spec import SlotId


def visible_accelerators(environment: Mapping[str, str] | None = None) -> tuple[SlotId, ...]:
    """Return the GPUs this process may use: `CUDA_VISIBLE_DEVICES` as it is, else all that the driver shows."""
    visible = (os.environ if environment is None else environment).get("CUDA_VISIBLE_DEVICES")
    present = _present()
    if visible is None or present == 0:
        return tuple(range(present))
    names = [name.strip() for name in visible.split(",") if name.strip()]
    return tuple(int(name) if name.isdecimal() else name for name in names if name != "-1")


def count_accelerators() -> int:
    """Number of GPUs this process may use; 0 on a machine without any."""
    return len(visible_accelerators())


def _present() -> int:
    """GPUs of this machine: device files (no process to start), else what nvidia-smi lists."""
    devices = [path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    if devices or not Path("/proc/driver/nvidia").exists():
        return len(devices)
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())


def smallest_memory() -> int | None:
    """Memory of this machine's smallest GPU in bytes, as nvidia-smi says; None where it says nothing."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    sizes = [int(line) for line in answer.split() if line.isdecimal()]
    return min(sizes) * 2**20 if sizes else None
