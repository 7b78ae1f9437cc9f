"""Reduction of the gradients of one range of layers while other ranges run their backward passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors


class _Started(NamedTuple):
    work: dist.Work
    flat: Tensor
    gradients: list[Tensor]


class RangeReduction:
    """Average of gradients over data ranks that starts as soon as a range of layers has its gradients.

    DeepSpeed's pipeline engine reduces all gradients after the last pass. Here the range whose last backward pass is
    done is reduced at once, in a copy, from which its gradients are filled at the end of the step. NCCL reduces on a
    stream of its own, gloo in a thread. The numbers are DeepSpeed's.

    Args:
        ranges: Parameters of each range. A parameter that several ranges or stages use is left out.
        gradient_of: Function from a parameter to its accumulated gradient.
        group: Data-parallel group.
        dtype: Type in which gradients are sent.

    Attributes:
        gradient_of: Function from a parameter to its accumulated gradient.
    """

    def __init__(
        self,
        ranges: Sequence[Sequence[nn.Parameter]],
        gradient_of: Callable[[nn.Parameter], Tensor],
        group: dist.ProcessGroup,
        dtype: torch.dtype,
    ) -> None:
        self._ranges = ranges
        self.gradient_of = gradient_of
        self._group = group
        self._ranks = dist.get_world_size(group)
        self._dtype = dtype
        self._held = {id(parameter) for parameters in ranges for parameter in parameters}
        self._started: list[_Started] = []

    def holds(self, parameter: nn.Parameter) -> bool:
        """Return whether a parameter is reduced here."""
        return id(parameter) in self._held

    def start(self, chunk: int) -> None:
        """Start to reduce the gradients of a range; all data ranks call it in the same order."""
        gradients = [self.gradient_of(parameter) for parameter in self._ranges[chunk]]
        gradients.sort(key=lambda gradient: str(gradient.dtype))
        for dtype, of_dtype in groupby(gradients, key=lambda gradient: gradient.dtype):
            together = list(of_dtype)
            flat = _flatten_dense_tensors(together)
            if dtype != self._dtype:
                flat = flat.to(self._dtype)
            elif len(together) == 1:
                flat = flat.clone()  # later passes add zeros to the gradient itself
            work = dist.all_reduce(flat, group=self._group, async_op=True)
            assert work is not None, "this rank is in the group"
            self._started.append(_Started(work, flat, together))

    def finish(self) -> None:
        """Wait for what was started, and fill the gradients with their averages."""
        for started in self._started:
            started.work.wait()
            average = started.flat.mul_(1 / self._ranks)
            for gradient, value in zip(
                started.gradients, _unflatten_dense_tensors(average, started.gradients), strict=True
            ):
                gradient.copy_(value)
        self._started.clear()
