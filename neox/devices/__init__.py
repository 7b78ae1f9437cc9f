"""What kinds of devices there are, and what each has: fast paths, backends, and for GPUs measured figures.

Nothing here imports torch. A rank asks `neox.ops.has_fast_path` about its own device, which reads this table; how a
machine shows its devices is in `neox.launch.hosts.vendors`, which refers to its rows.
"""

from neox.devices.gpu import GPUS, Gpu
from neox.devices.table import (
    DEVICES,
    FAST_PATHS,
    FP8_EXPERTS,
    LEAST_CAPABILITY,
    AttentionBackend,
    DeviceFamily,
    DeviceKind,
    FastPath,
    FastPathName,
    family_has,
)

__all__ = [
    "DEVICES",
    "FAST_PATHS",
    "FP8_EXPERTS",
    "GPUS",
    "LEAST_CAPABILITY",
    "AttentionBackend",
    "DeviceFamily",
    "DeviceKind",
    "FastPath",
    "FastPathName",
    "Gpu",
    "family_has",
]
