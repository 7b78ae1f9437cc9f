"""Passes on fake CUDA tensors, without a GPU and without a CUDA build of torch, in a process of its own.

A fake tensor (torch's `FakeTensorMode`) has a device, a type and a shape, and no numbers. torch refuses operations on
tensors of different devices, so a tensor that was left on the CPU shows up. Whatever makes the host wait for the device
is recorded. Numbers that the host reads are 1, 0.0 or False.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import neox
from neox.ops import triton_cross_entropy, triton_softmax

CUDA = torch.device("cuda", 0)
_H100 = SimpleNamespace(name="H100", major=9, minor=0, total_memory=80 * 2**30, multi_processor_count=132)
_NEOX = f"{Path(neox.__file__).parent}/"


def let_autograd_run() -> None:
    """Show fake CUDA tensors to autograd as tensors of another backend, for the whole of this process.

    In a build for CPUs nothing is registered that torch could ask about CUDA's devices and streams, and it would end
    the process. Python sees `cuda`; C++ sees a backend whose streams do nothing. What it makes for it becomes `cuda`
    again.
    """
    _setup_privateuseone_for_python_backend("fakegpu")
    shown = torch.device("fakegpu", 0)
    query = torch.ops.prim.device.default
    handlers = fake_tensor._DISPATCH_META_HANDLERS
    asked = handlers[query]
    dispatch = FakeTensor.__torch_dispatch__.__func__
    normalize = FakeTensor._normalize_fake_device

    def seen_by_autograd(args: tuple) -> torch.device:
        device = asked(args)
        return shown if device.type == "cuda" else device

    def dispatched(cls: type, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if func is query and not args[0].fake_mode.in_kernel_invocation:
            return seen_by_autograd(args)
        return dispatch(cls, func, types, args, kwargs or {})

    handlers[query] = seen_by_autograd
    FakeTensor.__torch_dispatch__ = classmethod(dispatched)
    FakeTensor._normalize_fake_device = staticmethod(
        lambda device: normalize(CUDA if device.type == "fakegpu" else device)
    )


class _Launch:
    """A Triton kernel that only looks at its arguments."""

    def __init__(self, kernel: Any) -> None:
        self.name = getattr(kernel, "__name__", None) or kernel.fn.__name__

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **constants: Any) -> None:
            assert all(0 < size < 2**31 for size in grid[:1]), f"{self.name}: grid {grid}"
            assert all(0 < size < 2**16 for size in grid[1:]), f"{self.name}: grid {grid}"
            for value in args:
                if isinstance(value, Tensor):
                    assert value.device.type == "cuda", f"{self.name} reads a tensor on {value.device}"
                    assert value.is_contiguous(), f"{self.name} reads a tensor of strides {value.stride()}"

        return launch


def _by_block_mask(q: Tensor, k: Tensor, v: Tensor, block_mask: Any, scale: float) -> Tensor:
    """Check what FlexAttention is given, and return a tensor of its shape."""
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "q_indices"):
        part = getattr(block_mask, name)
        assert part is None or part.device == q.device, f"{name} is on {part.device}, queries are on {q.device}"
    assert block_mask.shape[-2:] == (q.shape[2], k.shape[2]), (block_mask.shape, q.shape, k.shape)
    assert min(q.shape[-1], v.shape[-1]) >= 16, "FlexAttention's kernel refuses narrower heads"
    return F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=q.shape[1] != k.shape[1])


@contextmanager
def without_kernels() -> Iterator[None]:
    """Replace what would be compiled for a GPU, Triton's kernels and FlexAttention, by looks at its arguments."""
    with ExitStack() as stack:
        for module in (triton_cross_entropy, triton_softmax):
            for name, value in list(vars(module).items()):
                if type(value).__name__ in ("JITFunction", "InterpretedFunction"):
                    stack.enter_context(mock.patch.object(module, name, _Launch(value)))
        stack.enter_context(mock.patch("neox.ops.attention.attention_by_block_mask", _by_block_mask))
        stack.enter_context(mock.patch("neox.ops.flex.compiled_block_mask", return_value=create_block_mask))
        yield


def _place() -> str:
    """Return the innermost function of the library, or of DeepSpeed or torch's optimizers, that is running."""
    for frame in reversed(traceback.extract_stack(limit=60)):
        for root, shown in (
            ("/site-packages/deepspeed/", "deepspeed/"),
            ("/torch/optim/", "torch/optim/"),
            (_NEOX, ""),
        ):
            if root in frame.filename:
                return f"{shown}{frame.filename.split(root)[-1]}:{frame.name}"
    return "tests"


class _Stream:
    """A stream or an event that does nothing."""

    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


@contextmanager
def _stream(_: Any) -> Iterator[None]:
    yield


@contextmanager
def fake_cuda() -> Iterator[list[str]]:
    """Let new tensors be fake, and torch say that there is a GPU.

    Yields:
        What made the host wait so far, with its place: reads of a number, shapes that follow from numbers, and copies
        from pageable memory.
    """
    waits: list[str] = []

    def on_gpu(x: Any) -> bool:
        return isinstance(x, FakeTensor) and x.device.type == "cuda"

    def reading(name: str, answer: Any) -> Callable[..., Any]:
        original = getattr(Tensor, name)

        def read(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(x, FakeTensor):
                return original(x, *args, **kwargs)
            if on_gpu(x):
                waits.append(f"{name} at {_place()}")
            return answer(x) if callable(answer) else answer

        return read

    def ones(x: Tensor) -> Any:
        """Ones in the tensor's shape, as Python numbers; 0 for flags, such as those of an overflow."""
        if x.dim():
            return [ones(row) for row in x]
        if x.dtype in (torch.bool, torch.uint8):
            return 0
        return 1.0 if x.dtype.is_floating_point else 1

    def made(original: Callable[..., Tensor], name: str) -> Callable[..., Tensor]:
        """A tensor of Python numbers on the device: a copy from pageable memory."""

        def make(*args: Any, **kwargs: Any) -> Tensor:
            device = kwargs.pop("device", None)
            first = args[0]
            if device is None and name == "new_tensor" and on_gpu(first):
                device = CUDA
            if device is None or torch.device(device).type != "cuda":
                return original(*args, **kwargs)
            waits.append(f"{name} at {_place()}")
            values = args[-1]
            dtype = kwargs.get("dtype") or (first.dtype if name == "new_tensor" else None)
            shaped = torch.as_tensor(values, dtype=dtype)
            return torch.empty(shaped.shape, dtype=shaped.dtype, device=CUDA)

        return make

    def chosen(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def getitem(x: Tensor, index: Any) -> Tensor:
            if on_gpu(x) and isinstance(index, Tensor) and index.dtype == torch.bool:
                waits.append(f"index by a mask at {_place()}")
                return x.flatten(0, index.dim() - 1)  # as if all were chosen
            return original(x, index)

        return getitem

    count_nonzero = Tensor.nonzero

    def nonzero(x: Tensor) -> Tensor:
        if not on_gpu(x):
            return count_nonzero(x)
        waits.append(f"nonzero at {_place()}")
        return torch.zeros(x.numel(), x.dim(), dtype=torch.long, device=x.device)

    def unpinned(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args, pin_memory=False, **kwargs: original(*args, **kwargs)

    def pinned(x: Tensor, *_: Any) -> Tensor:
        copy = x.clone()
        copy.is_fake_pinned = True  # type: ignore[attr-defined]
        return copy

    def moved(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def to(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            args = tuple(CUDA if argument == "cuda" else argument for argument in args)
            result = original(x, *args, **kwargs)
            from_pinned = hasattr(x, "is_fake_pinned") and kwargs.get("non_blocking")
            if isinstance(result, FakeTensor) and result.device != x.device and not from_pinned:
                waits.append(f"copy from {x.device.type} at {_place()}")
            return result

        return to

    with ExitStack() as stack:
        for holder, name, value in (
            (torch.cuda, "is_available", lambda: True),
            (torch.cuda, "is_initialized", lambda: False),
            (torch.cuda, "device_count", lambda: 1),
            (torch.cuda, "current_device", lambda: 0),
            (torch.cuda, "get_device_capability", lambda *_: (9, 0)),
            (torch.cuda, "get_device_properties", lambda *_: _H100),
            (torch.cuda, "get_device_name", lambda *_: _H100.name),
            (torch.cuda, "set_device", lambda _: None),
            (torch.cuda, "synchronize", lambda *_: waits.append(f"synchronize at {_place()}")),
            (torch.cuda, "manual_seed_all", lambda *_: None),
            (torch.cuda, "manual_seed", lambda *_: None),
            (torch.cuda, "get_rng_state", lambda *_: torch.zeros(16, dtype=torch.uint8)),
            (torch.cuda, "set_rng_state", lambda *_: None),
            (torch.cuda, "empty_cache", lambda: None),
            (torch.cuda, "reset_peak_memory_stats", lambda *_: None),
            (torch.cuda, "max_memory_allocated", lambda *_: 0),
            (torch.cuda, "memory_allocated", lambda *_: 0),
            (torch.cuda, "memory_stats", lambda *_: {}),
            (torch.cuda, "mem_get_info", lambda *_: (80 * 2**30, 80 * 2**30)),
            (torch.cuda, "Stream", _Stream),
            (torch.cuda, "Event", _Stream),
            (torch.cuda, "default_generators", (torch.Generator(),)),
            (torch.cuda, "current_stream", _Stream),
            (torch.cuda, "default_stream", _Stream),
            (torch.cuda, "stream", _stream),
            (Tensor, "record_stream", lambda *_: None),
            (Tensor, "pin_memory", pinned),
            (Tensor, "__getitem__", chosen(Tensor.__getitem__)),
            (Tensor, "nonzero", nonzero),
            (torch, "zeros", unpinned(torch.zeros)),
            (torch, "empty", unpinned(torch.empty)),
            (fake_tensor, "init_gpu_context", lambda _: None),
            (Tensor, "item", reading("item", ones)),
            (Tensor, "tolist", reading("tolist", ones)),
            (FakeTensor, "tolist", reading("tolist", ones)),
            (Tensor, "__bool__", reading("__bool__", False)),
            (Tensor, "__float__", reading("__float__", 0.0)),
            (Tensor, "__int__", reading("__int__", 1)),
            (Tensor, "__index__", reading("__index__", 1)),
            (Tensor, "to", moved(Tensor.to)),
            (Tensor, "cpu", moved(Tensor.cpu)),
            (torch, "tensor", made(torch.tensor, "torch.tensor")),
            (Tensor, "new_tensor", made(Tensor.new_tensor, "new_tensor")),
        ):
            stack.enter_context(mock.patch.object(holder, name, value, create=True))
        stack.enter_context(without_kernels())
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield waits
