"""One piece of memory as a tensor of the CPU or of the device, through DLPack."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

# Values of DLDeviceType in dlpack.h. torch takes its free device type for the last one.
_CPU = 1
_EXTENSION = 12

_content = ctypes.pythonapi.PyCapsule_GetPointer
_content.restype = ctypes.c_void_p
_content.argtypes = [ctypes.py_object, ctypes.c_char_p]


class _Head(ctypes.Structure):
    """The first fields of a DLManagedTensor."""

    _fields_ = (("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32))


def on_device(x: Tensor) -> Tensor:
    """Return a tensor of the device in the memory of a CPU tensor, which lives as long as the result."""
    return _labelled(x, _EXTENSION)


def on_cpu(x: Tensor) -> Tensor:
    """Return a CPU tensor in the memory of a tensor of the device."""
    return _labelled(x, _CPU)


def _labelled(x: Tensor, device_type: int) -> Tensor:
    capsule = torch._C._to_dlpack(x)
    head = _Head.from_address(_content(capsule, b"dltensor"))
    head.device_type = device_type
    head.device_id = 0
    return torch._C._from_dlpack(capsule)
