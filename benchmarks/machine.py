"""Description of the machine of a measurement."""

from __future__ import annotations

import datetime
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch


def cpu_name() -> str:
    """Return the processor's name where Linux tells it, else its family."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def describe(device: torch.device) -> dict[str, Any]:
    """Return the date, the device and the versions of a measurement."""
    if device.type == "cuda":
        what = torch.cuda.get_device_name(device)
    else:
        what = f"CPU ({cpu_name()}), {torch.get_num_threads()} threads"
    versions = {"torch": torch.__version__, "deepspeed": metadata.version("deepspeed")}
    if device.type == "cpu":
        versions["transformers"] = metadata.version("transformers")
    today = datetime.date.today().isoformat()
    return {"date": today, "device": what, **versions, "python": platform.python_version()}
