"""A stand-in for Huawei's `torch_npu`: the device type `npu`, whose memory is the CPU's.

What a device does, this one does too: a tensor is on it or it is not, and an operation that gets tensors of both
devices raises. So whatever the library leaves on the CPU by mistake shows up in an ordinary training without a card,
and the numbers are those of the CPU. DeepSpeed finds this package by its name, and runs its own accelerator for NPUs
on top.

    neox -> deepspeed.accelerator (NPU_Accelerator, DeepSpeed's own) -> torch.npu (`device_module`)
                                                                     -> kernels of the device (`kernels`)
         -> torch.distributed, backend "hccl"                        -> `collectives`, over gloo

torch's Python backend for its free device type (`PrivateUse1`) carries autograd, views, `.data`, storages and
optimizers. It ends here:

- It has one device: its guard says 1 whatever the module says. Every rank sees one NPU, as under a scheduler that
  shows each rank its own.
- Streams and events do nothing: torch's guard has none for a Python backend. A missing wait is not found.
- Generators cannot be made for the device, and its memory cannot be pinned: `torch.Generator` and `Tensor.pin_memory`
  ask C++ hooks that Python cannot provide. Random numbers are those of a CPU generator that belongs to the device, and
  pinned memory is ordinary memory.
- Nothing is compiled: neither inductor nor Triton knows the device.
"""

from __future__ import annotations

import torch
import torch.utils.backend_registration as registration
from torch_npu import collectives, device_module, kernels

__all__ = ["collectives", "device_module", "kernels"]

registration._setup_privateuseone_for_python_backend("npu", backend_module=device_module)
kernels.register()
collectives.register()
torch.Tensor.pin_memory = device_module.pin_memory
torch.Tensor.is_pinned = device_module.is_pinned
torch.Tensor.record_stream = device_module.record_stream
for holder in (torch, torch.Tensor):
    for name in ("empty", "zeros", "full", "tensor", "empty_like", "zeros_like", "new_empty", "new_zeros", "new_full"):
        if hasattr(holder, name):
            setattr(holder, name, device_module.without_pinning(getattr(holder, name)))
