"""Which fast paths a device of this process has: the table of devices (`neox.devices`), asked with torch.

What only this process knows is added: whose GPUs torch's `cuda` are, and whether Triton and packages of kernels are
installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from types import MappingProxyType
from typing import Final, get_args

import torch

from neox.devices import DEVICES, FAST_PATHS, DeviceFamily, FastPathName

HAS_TRITON: Final = find_spec("triton") is not None
"""Whether Triton's kernels can be compiled."""


def device_family(device_type: str) -> DeviceFamily | None:
    """Return the kind of devices that torch calls so in this process; None for one that no fast path is known for."""
    if device_type == "cuda" and torch.version.hip is not None:
        return "rocm"
    for family in get_args(DeviceFamily):
        if family == device_type:
            return family
    return None


def _paths_of(device_type: str) -> frozenset[FastPathName]:
    family = device_family(device_type)
    if family is None:
        return frozenset()
    missing = {name for name, path in FAST_PATHS.items() if path.module and find_spec(path.module) is None}
    if not HAS_TRITON:
        missing.add("triton")
    return DEVICES[family].fast_paths - missing


# A constant, so that torch.compile reads it while it traces.
_PATHS: Mapping[str, frozenset[FastPathName]] = MappingProxyType(
    {kind.torch_type: _paths_of(kind.torch_type) for kind in DEVICES.values()}
)


def has_fast_path(name: FastPathName, device: torch.device) -> bool:
    """Return whether a device takes a fast path. Otherwise the caller takes the plain one."""
    return name in _PATHS.get(device.type, ())


def machine_has_fast_path(name: FastPathName) -> bool:
    """Return whether this machine's accelerator takes a fast path; False without one."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator is not None and has_fast_path(name, accelerator)
