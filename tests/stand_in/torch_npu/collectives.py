"""The backend `hccl` of torch.distributed: gloo, which refuses tensors of the CPU here."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map
from torch_npu.memory import on_cpu

# Methods of a process group -> those of gloo's backend, which keeps torch's older names.
_METHODS = {
    "allreduce": "allreduce",
    "allreduce_coalesced": "allreduce_coalesced",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "allgather": "allgather",
    "_allgather_base": "_allgather_base",
    "all_gather_single": "_allgather_base",
    "allgather_coalesced": "allgather_coalesced",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "_reduce_scatter_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "gather": "gather",
    "scatter": "scatter",
    "alltoall": "alltoall",
    "alltoall_base": "alltoall_base",
    "all_to_all_single": "alltoall_base",
    "send": "send",
    "recv": "recv",
    "recv_anysource": "recv_anysource",
}


def register() -> None:
    """Make the backend known to torch."""
    dist.Backend.register_backend("hccl", ProcessGroupHCCL, devices=["npu"])


class ProcessGroupHCCL(dist.ProcessGroup):
    """A group whose messages go through gloo."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(dist.PrefixStore("hccl", store), rank, size, timeout)

    def _set_group_name(self, name: str) -> None:
        self._name = name  # torch asks its backends for the name, and this group has none

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("npu")]

    def getBackendName(self) -> str:
        return "hccl"

    def barrier(self, opts: Any = None) -> dist.Work:
        return self.gloo.barrier()

    def allgather_into_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        return self._each("_allgather_base", outputs, inputs)

    def reduce_scatter_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> dist.Work:
        options = dist.ReduceScatterOptions()
        options.reduceOp = opts.reduceOp
        return self._each("_reduce_scatter_base", outputs, inputs, options)

    def _each(self, name: str, outputs: list[Tensor], inputs: list[Tensor], *opts: Any) -> dist.Work:
        """Run a collective for each pair of tensors: gloo has none for several."""
        works = [getattr(self, name)(out, given, *opts) for out, given in zip(outputs, inputs, strict=True)]
        for work in works[:-1]:
            work.wait()
        return works[-1]

    def shutdown(self) -> None: ...


def _forwarded(name: str) -> Callable[..., dist.Work]:
    def send(self: ProcessGroupHCCL, *args: Any, **kwargs: Any) -> dist.Work:
        args, kwargs = tree_map(lambda value: _lowered(value, name), (args, kwargs))
        return getattr(self.gloo, name)(*args, **kwargs)

    return send


def _lowered(value: Any, name: str) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.device.type != "npu":
        raise RuntimeError(f"{name}: hccl has no kernel for tensors on {value.device}")
    return on_cpu(value)


for _method, _name in _METHODS.items():
    setattr(ProcessGroupHCCL, _method, _forwarded(_name))
