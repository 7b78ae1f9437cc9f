"""What makes the host of a card wait for it, noted by the stand-in while `record` runs.

The host of a card queues work and runs ahead. It stops where it reads a number or a shape that depends on numbers,
where it copies from or to memory that is not pinned, and where the program says so. The stand-in does everything at
once, so that no such stop takes time here; it only notes them.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

# Operations of which the host reads a number, or whose result has a shape that it must know. An index by a mask calls
# `nonzero`.
_READS = frozenset(
    (
        "_local_scalar_dense",
        "nonzero",
        "masked_select",
        "unique_dim",
        "_unique2",
        "unique_consecutive",
        "bincount",
        "equal",
        "is_nonzero",
        "_linalg_check_errors",
    )
)
_LIBRARIES = ("neox", "deepspeed", "tests")
_OWN = Path(__file__).parent


@dataclass(frozen=True)
class Wait:
    """One wait of the host.

    Attributes:
        what: What the host did.
        places: Functions of the library, of DeepSpeed and of tests that were running, the innermost one first, as
            `neox/engine/engine.py:train_batch`. In a thread of autograd those of the host's main thread follow.
    """

    what: str
    places: tuple[str, ...]


_recorded: list[Wait] | None = None
_pinned: dict[int, StorageWeakRef] = {}  # by address


@contextmanager
def record() -> Iterator[list[Wait]]:
    """Note the waits of this process, also those in autograd's threads."""
    global _recorded
    _recorded = []
    try:
        yield _recorded
    finally:
        _recorded = None


def note(what: str) -> None:
    """Note a wait."""
    if _recorded is not None:
        _recorded.append(Wait(what, _running_functions()))


def of_operation(operation: torch._ops.OpOverload, kwargs: dict[str, Any]) -> None:
    """Note a wait if the host of a card waits in this operation."""
    if _recorded is None:
        return
    name = operation._schema.name.removeprefix("aten::")
    if name in _READS or (name == "repeat_interleave" and kwargs.get("output_size") is None):
        note(name)


def of_copy(source: Tensor, target: Tensor, *, non_blocking: bool) -> None:
    """Note a wait if a copy between the devices needs one."""
    if _recorded is None or source.device.type == target.device.type or source.numel() == 0:
        return
    memory = source if source.device.type == "cpu" else target
    if not is_pinned(memory):
        note(f"copy {source.device.type} to {target.device.type}, not pinned")
    elif not non_blocking:
        note(f"copy {source.device.type} to {target.device.type}, blocking")


def pin(x: Tensor) -> Tensor:
    """Take a tensor's memory for pinned from now on."""
    storage = x.untyped_storage()
    _pinned[storage.data_ptr()] = StorageWeakRef(storage)
    return x


def is_pinned(x: Tensor) -> bool:
    """Return whether the memory of a tensor is pinned."""
    found = _pinned.get(x.untyped_storage().data_ptr())
    return found is not None and not found.expired()


def _running_functions() -> tuple[str, ...]:
    frame: FrameType | None = sys._getframe(1)
    places = _places(frame)
    if threading.current_thread() is not threading.main_thread():
        places += _places(sys._current_frames()[threading.main_thread().ident or 0])
    return tuple(places)


def _places(frame: FrameType | None) -> list[str]:
    places = []
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if _OWN not in path.parents:
            for library in _LIBRARIES:
                if library in path.parts[:-1]:
                    last = len(path.parts) - 1 - path.parts[::-1].index(library)
                    places.append("/".join(path.parts[last:]) + ":" + frame.f_code.co_name)
                    break
        frame = frame.f_back
    return places
