"""Kernels of the device: those of the CPU, in the same memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch_npu import device_module, waits
from torch_npu.memory import on_cpu, on_device

_CPU_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
# Operations that make another tensor of the same storage, or give a tensor another one. The CPU's kernels never look at
# the device.
_OF_STORAGES = (
    "as_strided",
    "view",
    "view.dtype",
    "_reshape_alias",
    "unfold",
    "set_",
    "set_.source_Storage",
    "set_.source_Storage_storage_offset",
    "set_.source_Tensor",
)
_libraries: list[torch.library.Library] = []  # registrations end with their library


def register() -> None:
    """Register the kernels of the device."""
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(_compute, "PrivateUse1")
    aten = torch.library.Library("aten", "IMPL")
    aten.impl("empty.memory_format", _empty, "PrivateUse1")
    aten.impl("empty_strided", _empty_strided, "PrivateUse1")
    aten.impl("resize_", _resize, "PrivateUse1")
    aten.impl("_copy_from", _copy_from, "PrivateUse1")
    aten.impl("_copy_from_and_resize", _copy_from_and_resize, "PrivateUse1")
    for name in _OF_STORAGES:
        aten.impl(name, _cpu_kernel(name), "PrivateUse1")
    _libraries.extend((everything, aten))


def _cpu_kernel(name: str) -> Callable[..., Any]:
    operation, _, overload = name.partition(".")
    found = getattr(getattr(torch.ops.aten, operation), overload or "default")
    return lambda *args, **kwargs: found.redispatch(_CPU_KEYS, *args, **kwargs)


def _empty(size: Any, *, dtype: Any = None, memory_format: Any = None, **_: Any) -> Tensor:
    return on_device(torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format))


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> Tensor:
    return on_device(torch.empty_strided(size, stride, dtype=dtype))


def _resize(x: Tensor, size: Any, *, memory_format: Any = None) -> Tensor:
    """Resize in place. Memory that came through DLPack does not grow: the tensor gets other memory."""
    old = on_cpu(x)
    new = torch.empty(size, dtype=x.dtype)
    count = min(old.numel(), new.numel())
    new.view(-1)[:count] = old.reshape(-1)[:count]
    torch.ops.aten.set_.source_Tensor.redispatch(_CPU_KEYS, x, on_device(new))
    return x


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy from any device to any other."""
    waits.of_copy(source, target, non_blocking=non_blocking)
    read = on_cpu(source) if source.device.type == "npu" else source
    written = on_cpu(target) if target.device.type == "npu" else target
    written.copy_(read)
    return target


def _copy_from_and_resize(source: Tensor, target: Tensor) -> Tensor:
    return _copy_from(source, target.resize_(source.shape))


def _compute(operation: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run any other operation by the CPU's kernel.

    Raises:
        RuntimeError: An argument is on the CPU. A number (a tensor without dimensions) may be, as for every device.
    """
    waits.of_operation(operation, kwargs)
    given: list[tuple[Tensor, Tensor]] = []  # tensors of the device and the CPU tensors in their memory

    def lower(value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if not isinstance(value, Tensor):
            return value
        if value.device.type == "npu":
            lowered = on_cpu(value)
            if value.numel() == 0:  # an `out` of no size yet, which the kernel lets grow
                lowered = torch.empty_like(lowered)
            given.append((value, lowered))
            return lowered
        if value.dim() > 0:
            raise RuntimeError(f"{operation}: a tensor {tuple(value.shape)} is on {value.device}, others are on npu:0")
        return value

    args, kwargs = tree_map(lower, (args, kwargs))
    args = tuple(
        _as_tensor(argument, value) for argument, value in zip(operation._schema.arguments, args, strict=False)
    )
    _draw_from_device(operation, args, kwargs)
    result = operation(*args, **kwargs)
    for value, lowered in given:
        if value.numel() == 0 and lowered.numel() > 0:
            torch.ops.aten.set_.source_Tensor.redispatch(_CPU_KEYS, value, on_device(lowered))

    def raise_again(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        for original, lowered in given:
            if value is lowered:
                return original
        return on_device(value)

    return tree_map(raise_again, result)


def _as_tensor(argument: Any, value: Any) -> Any:
    """Return a number as a tensor where the kernel takes one: torch hands over numbers that it had wrapped."""
    if isinstance(value, int | float) and isinstance(argument.type, torch.TensorType):
        return torch.tensor(value)
    return value


def _draw_from_device(operation: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Let an operation without a generator of its own take that of the device."""
    for number, argument in enumerate(operation._schema.arguments):
        if argument.name == "generator" and len(args) <= number and kwargs.get("generator") is None:
            kwargs["generator"] = device_module.default_generators[0]
