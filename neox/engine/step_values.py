"""Scores and gradient norm of a step on their way to the host, which need not wait for the optimizer's update."""

from __future__ import annotations

import torch
from torch import Tensor


class StepValues:
    """Scores and a gradient norm that are copied to the host before the update is queued.

    A host that reads a tensor waits for all that was queued before. So the copies are queued before the update, and
    `take` waits for them alone: the device updates weights while the host prepares the next step.

    Args:
        device: Device of the tensors.
        count: Number of scores.
    """

    def __init__(self, device: torch.device, count: int) -> None:
        on_gpu = device.type == "cuda"
        self._host = torch.zeros(count + 1, dtype=torch.float32, pin_memory=on_gpu)
        self._numbers = self._host.numpy()
        self._copied = torch.cuda.Event() if on_gpu else None
        self._waiting = False

    def put(self, scores: Tensor, norm: Tensor | float) -> None:
        """Queue the copies of a step's numbers, unless they already are: an optimizer may update in several calls."""
        if self._waiting:
            return
        self._waiting = True
        self._host[:-1].copy_(scores, non_blocking=True)
        if isinstance(norm, Tensor):
            self._host[-1:].copy_(norm.detach().reshape(1), non_blocking=True)
        else:
            self._host[-1] = norm
        if self._copied is not None:
            self._copied.record()

    def take(self) -> tuple[list[float], float] | None:
        """Return scores and norm when they are there; None if none were queued since the last call."""
        if not self._waiting:
            return None
        self._waiting = False
        if self._copied is not None:
            self._copied.synchronize()
        *scores, norm = self._numbers.tolist()
        return scores, norm
