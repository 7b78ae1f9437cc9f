"""`torch.npu`: the functions of the device that DeepSpeed's accelerator and torch ask for."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch_npu import waits

default_generators = (torch.Generator(),)
_TOTAL_MEMORY = 64 * 2**30  # bytes, as an Ascend 910B has


class Stream:
    """A stream on which everything is done at once."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: Any) -> None: ...
    def synchronize(self) -> None:
        waits.note("synchronize a stream")

    def wait_stream(self, stream: Stream) -> None: ...
    def wait_event(self, event: Event) -> None: ...
    def query(self) -> bool:
        return True

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event


class Event:
    """A point in time, which has passed once it is recorded."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self.time = 0.0

    def record(self, stream: Stream | None = None) -> None:
        self.time = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None: ...
    def synchronize(self) -> None:
        waits.note("synchronize an event")

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        return (end.time - self.time) * 1000


_STREAM = Stream()


def current_stream(device: Any = None) -> Stream:
    return _STREAM


default_stream = current_stream


def stream(chosen: Stream) -> Stream:
    return chosen


@contextlib.contextmanager
def device(index: Any) -> Iterator[None]:
    yield


def is_available() -> bool:
    return True


is_initialized = is_available


def is_bf16_supported() -> bool:
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    return 1


def current_device() -> int:
    return 0


def set_device(index: Any) -> None:
    if torch.device("npu", index).index != 0 if isinstance(index, int) else torch.device(index).index not in (None, 0):
        raise RuntimeError(f"set_device: this process sees npu:0 only, not {index}")


def synchronize(index: Any = None) -> None:
    waits.note("synchronize the device")


def _lazy_call(callback: Callable[[], None]) -> None:
    callback()


# -- random numbers


def manual_seed(seed: int) -> None:
    default_generators[0].manual_seed(seed)


manual_seed_all = manual_seed


def initial_seed() -> int:
    return default_generators[0].initial_seed()


def get_rng_state(index: Any = None) -> Tensor:
    return default_generators[0].get_state()


def set_rng_state(state: Tensor, index: Any = None) -> None:
    default_generators[0].set_state(state)


# -- memory


def get_device_properties(index: Any = None) -> SimpleNamespace:
    return SimpleNamespace(name="stand-in", total_memory=_TOTAL_MEMORY)


def get_device_name(index: Any = None) -> str:
    return "stand-in"


def memory_allocated(index: Any = None) -> int:
    return 0


max_memory_allocated = memory_reserved = max_memory_reserved = memory_allocated
memory_cached = max_memory_cached = memory_allocated


def memory_stats(index: Any = None) -> dict[str, int]:
    return {}


def empty_cache() -> None: ...


def reset_peak_memory_stats(index: Any = None) -> None: ...


reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats


def pin_memory(x: Tensor, device: Any = None) -> Tensor:
    """`Tensor.pin_memory`: memory of its own, which is the CPU's."""
    if x.device.type != "cpu":
        raise RuntimeError(f"cannot pin memory of {x.device}: only that of the CPU")
    return waits.pin(x.clone())


def without_pinning(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function that makes a tensor in ordinary memory, and remembers if pinned memory was asked for."""

    def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        result = make(*args, **kwargs)
        return waits.pin(result) if pin_memory else result

    return made


def is_pinned(x: Tensor, device: Any = None) -> bool:
    return waits.is_pinned(x)


def record_stream(x: Tensor, stream: Stream) -> None:
    """`Tensor.record_stream`."""
    if x.device.type != "npu":
        raise RuntimeError(f"record_stream: the tensor is on {x.device}")


# -- types of tensors, of which DeepSpeed only calls the constructors


def _constructor(dtype: torch.dtype) -> Callable[..., Tensor]:
    return lambda values: torch.tensor(values, dtype=dtype, device="npu")


BFloat16Tensor = _constructor(torch.bfloat16)
ByteTensor = _constructor(torch.uint8)
DoubleTensor = _constructor(torch.float64)
FloatTensor = _constructor(torch.float32)
HalfTensor = _constructor(torch.float16)
IntTensor = _constructor(torch.int32)
LongTensor = _constructor(torch.int64)
