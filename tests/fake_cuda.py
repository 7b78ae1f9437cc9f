"""Passes on fake CUDA tensors, without a GPU and without a CUDA build of torch, in a process of its own.

A fake tensor (torch's `FakeTensorMode`) has a device, a type and a shape, and no numbers. torch refuses operations on
tensors of different devices, so a tensor that was left on the CPU shows up. Whatever makes the host wait for the device
is recorded. Numbers that the host reads are 1, 0.0 or False.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from neox.ops import triton_cross_entropy, triton_softmax

CUDA = torch.device("cuda", 0)


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
    """Return the innermost line of the library that is running."""
    for frame in reversed(traceback.extract_stack(limit=40)):
        if "/neox/" in frame.filename and "tests" not in frame.filename.split("/neox/")[-1]:
            return f"{frame.filename.split('/neox/')[-1]}:{frame.lineno}"
    return "tests"


@contextmanager
def fake_cuda() -> Iterator[list[str]]:
    """Let new tensors be fake, and torch say that there is a GPU.

    Yields:
        What made the host wait so far, with its place: reads of a number, and copies from pageable memory.
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
            return answer

        return read

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

    def moved(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def to(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            result = original(x, *args, **kwargs)
            if isinstance(result, FakeTensor) and result.device != x.device:
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
            (fake_tensor, "init_gpu_context", lambda _: None),
            (Tensor, "item", reading("item", 1)),
            (Tensor, "tolist", reading("tolist", [1])),
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
