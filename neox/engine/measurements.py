"""What is measured of a step: its scores and gradient norm, and the time of its parts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

FORWARD = "forward"
BACKWARD = "backward"
COMMUNICATION = "communication"
"""Reduction of gradients, and what pipeline stages send each other. Collectives inside layers (tensor ranks, ZeRO 3)
belong to `FORWARD` and `BACKWARD`, those of the update to `OPTIMIZER`."""
OPTIMIZER = "optimizer"
PARTS = (FORWARD, BACKWARD, COMMUNICATION, OPTIMIZER)


class StepValues:
    """Rows of scores and the gradient norm of a step, copied to the host before the update is queued.

    A host that reads a tensor waits for all that was queued before. So the copies are queued before the update, and
    `take` waits only for them: the device updates weights while the host prepares the next step.

    Args:
        device: Device of the tensors.
        count: Number of scores that have a row.
    """

    def __init__(self, device: torch.device, count: int) -> None:
        self._host = torch.zeros(2 * count + 1, dtype=torch.float32)
        self._copied = None
        if device.type != "cpu":
            self._host = get_accelerator().pin_memory(self._host)
            self._copied = get_accelerator().Event()
        self._numbers = self._host.numpy()
        self._waiting = False

    def put(self, rows: Tensor, norm: Tensor | float) -> None:
        """Queue the copies of a step's numbers, unless they already are: an optimizer may update in several calls.

        Args:
            rows: Totals and counts of the scores [K, 2].
            norm: Norm of the gradient.
        """
        if self._waiting:
            return
        self._waiting = True
        self._host[:-1].copy_(rows.flatten(), non_blocking=True)
        if isinstance(norm, Tensor):
            self._host[-1:].copy_(norm.detach().reshape(1), non_blocking=True)
        else:
            self._host[-1] = norm
        if self._copied is not None:
            self._copied.record()

    def take(self) -> tuple[list[list[float]], float] | None:
        """Return rows and norm when they are there; None if none were queued since the last call."""
        if not self._waiting:
            return None
        self._waiting = False
        if self._copied is not None:
            self._copied.synchronize()
        return self._numbers[:-1].reshape(-1, 2).tolist(), float(self._numbers[-1])


class StepTimers:
    """Seconds in each part of a step on this rank, each without the parts inside it (`wall_clock_breakdown`).

    Args:
        device: Device that is waited for before and after every part.
    """

    def __init__(self, device: torch.device) -> None:
        self._accelerator = device if device.type != "cpu" else None
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._inside: list[float] = []  # for each part under way: the seconds in parts inside it

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the time of the context to a part."""
        self._synchronize()
        started = time.perf_counter()
        self._inside.append(0.0)
        try:
            yield
        finally:
            self._synchronize()
            seconds = time.perf_counter() - started
            self._seconds[name] += seconds - self._inside.pop()
            if self._inside:
                self._inside[-1] += seconds

    def take(self) -> dict[str, float]:
        """Return the seconds of each part since the last call."""
        seconds = self._seconds
        self._seconds = dict.fromkeys(PARTS, 0.0)
        return seconds

    def _synchronize(self) -> None:
        if self._accelerator is not None:
            get_accelerator().synchronize(self._accelerator.index)

    def take_computing(self) -> float:
        """Return the seconds of forward and backward passes; called before `take`."""
        return self._seconds[FORWARD] + self._seconds[BACKWARD]


class NoTimers:
    """Timers that measure nothing."""

    def part(self, name: str) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        return nullcontext()

    def take(self) -> dict[str, float]:
        """Return no parts."""
        return {}

    def take_computing(self) -> float:
        """Return no time."""
        return 0.0


class PassTimers:
    """Seconds of forward and backward passes, without waiting for the device.

    On an accelerator events are queued around each pass, and read when the step is over.

    Args:
        device: Device of the passes.
    """

    def __init__(self, device: torch.device) -> None:
        self._has_events = device.type != "cpu"
        self._parts: list[str] = []  # under way
        self._passes: list[tuple[Any, Any]] = []
        self._within_passes: list[tuple[Any, Any]] = []

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Measure a pass, or what waits for other ranks inside of one."""
        started = self._now()
        self._parts.append(name)
        try:
            yield
        finally:
            self._parts.pop()
            span = (started, self._now())
            if self._parts in ([FORWARD], [BACKWARD]):
                self._within_passes.append(span)
            elif not self._parts and name in (FORWARD, BACKWARD):
                self._passes.append(span)

    def take(self) -> dict[str, float]:
        """Return no parts: they are reported with `wall_clock_breakdown` only."""
        self._passes.clear()
        self._within_passes.clear()
        return {}

    def take_computing(self) -> float:
        """Return the seconds of forward and backward passes since the last `take`, when the device has run them."""
        return sum(map(self._length, self._passes)) - sum(map(self._length, self._within_passes))

    def _now(self) -> Any:
        if not self._has_events:
            return time.perf_counter()
        event = get_accelerator().Event(enable_timing=True)
        event.record()
        return event

    def _length(self, span: tuple[Any, Any]) -> float:
        started, ended = span
        if not self._has_events:
            return float(ended - started)
        return float(started.elapsed_time(ended)) / 1000


Timers = StepTimers | NoTimers | PassTimers
