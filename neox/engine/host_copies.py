"""Copies of a state in CPU memory, made beside a GPU's work."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from neox.log import get_logger

_log = get_logger(__name__)


class HostCopies:
    """Copies of tensors in CPU memory: of a GPU's in pinned memory, by a stream of its own.

    The GPU goes on with the forward and backward pass meanwhile. What overwrites the tensors calls `hold` before, and
    who reads the copies calls `wait`. torch keeps pinned memory for the next copies, and rounds sizes up to powers of
    two unless PYTORCH_ALLOC_CONF holds `pinned_max_round_threshold_mb`.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._pinned = True

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a copy, whose content is there after `wait`."""
        tensor = tensor.detach()
        host = self._pinned_like(tensor) if tensor.is_cuda else None
        if host is None:
            return tensor.to("cpu", copy=True)
        if tensor.device not in self._streams:
            self._streams[tensor.device] = torch.cuda.Stream(tensor.device)
        stream = self._streams[tensor.device]
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)  # memory of a tensor that is gathered for the copy is not used again before
        return host

    def hold(self) -> None:
        """Let the GPU finish the copies before any work that is queued from now on; the host does not wait."""
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)

    def wait(self) -> None:
        """Wait until the content of all copies is there."""
        for stream in self._streams.values():
            stream.synchronize()

    def _pinned_like(self, tensor: Tensor) -> Tensor | None:
        """Return pinned memory; None where the system gives none, and the copy then makes the host wait."""
        if not self._pinned:
            return None
        try:
            return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        except RuntimeError as error:
            self._pinned = False
            _log.warning("async_save: no more pinned memory (%s); training waits for the rest of the copies", error)
            return None


def snapshot(value: Any, copies: HostCopies, seen: dict[int, Tensor] | None = None) -> Any:
    """Copy a state dict into CPU memory; a tensor that occurs twice is copied once.

    Args:
        value: Tensors and plain values in dictionaries, lists and tuples.
        copies: Makes the copies of tensors.
        seen: Copies made so far, by id of the tensor.
    """
    seen = {} if seen is None else seen
    if isinstance(value, Tensor):
        if id(value) not in seen:
            seen[id(value)] = copies.copy(value)
        return seen[id(value)]
    if type(value) in (list, tuple):
        return type(value)(snapshot(item, copies, seen) for item in value)
    if type(value) is dict:
        return {key: snapshot(item, copies, seen) for key, item in value.items()}
    if isinstance(value, Mapping):  # OrderedDict and similar types stay what they are
        copied: Any = copy.copy(value)
        for key, item in value.items():
            copied[key] = snapshot(item, copies, seen)
        return copied
    return copy.deepcopy(value)
