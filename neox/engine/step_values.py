"""Scalars of a step on their way from the device to the host, without waiting for the optimizer's update."""

from __future__ import annotations

import torch
from torch import Tensor


class StepValues:
    """Scalars that are copied to the host before the update is queued.

    A host that reads a tensor waits for all that was queued before. So the copies are queued before the update, and
    `take` waits for them alone: the device updates weights while the host prepares the next step.

    Args:
        device: Device of the tensors.
        count: Number of scalars.
    """

    def __init__(self, device: torch.device, count: int) -> None:
        on_gpu = device.type == "cuda"
        self._host = torch.zeros(count, dtype=torch.float32, pin_memory=on_gpu)
        self._numbers = self._host.numpy()
        self._copied = torch.cuda.Event() if on_gpu else None
        self._waiting = False

    def put(self, *values: Tensor | float) -> None:
        """Queue the copies of a step's scalars, unless they already are: an optimizer may update in several calls."""
        if self._waiting:
            return
        self._waiting = True
        for slot, value in zip(self._host, values, strict=True):
            if isinstance(value, Tensor):
                slot.copy_(value.detach().reshape(()), non_blocking=True)
            else:
                slot.fill_(value)
        if self._copied is not None:
            self._copied.record()

    def take(self) -> list[float] | None:
        """Return the scalars when they are there; None if none were queued since the last call."""
        if not self._waiting:
            return None
        self._waiting = False
        if self._copied is not None:
            self._copied.synchronize()
        numbers: list[float] = self._numbers.tolist()
        return numbers
