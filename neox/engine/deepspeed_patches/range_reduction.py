"""Reduction of the gradients of a range of layers while other ranges run their backward passes."""

from __future__ import annotations

from collections import Counter
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

    def finish_arrived(self) -> None:
        """Fill the gradients whose averages have arrived, so that their copies are released early."""
        while self._started and self._started[0].work.is_completed():
            self._fill(self._started.pop(0))

    def finish(self) -> None:
        """Wait for what was started, and fill the gradients with their averages."""
        for started in self._started:
            self._fill(started)
        self._started.clear()

    def _fill(self, started: _Started) -> None:
        started.work.wait()
        average = started.flat.mul_(1 / self._ranks)
        for gradient, value in zip(
            started.gradients, _unflatten_dense_tensors(average, started.gradients), strict=True
        ):
            gradient.copy_(value)


class LayerReduction:
    """Average of gradients over data ranks during the last backward pass of a step, from the last layers to the first.

    DeepSpeed's engine for the whole network reduces after that pass. Here consecutive layers are reduced together as
    soon as all their parameters have their gradients:

        backward pass      | head, block 3 | block 2, block 1 | block 0, embedding |
        reduction                          | head, block 3    | block 2, block 1   | block 0, embedding |

    All data ranks start ranges in the same order, whatever the order in which gradients appear. A range that lacks
    gradients after the pass, because this micro batch did not use a parameter, is started then.

    Args:
        ranges: Parameters of each range, the last layers first.
        reduction: Reduces these ranges.
    """

    def __init__(self, ranges: Sequence[Sequence[nn.Parameter]], reduction: RangeReduction) -> None:
        self._sizes = [len(parameters) for parameters in ranges]
        self._range_of = {id(parameter): number for number, range_ in enumerate(ranges) for parameter in range_}
        self._reduction = reduction
        self._missing: list[int] = []  # of each range, while the last backward pass runs
        self._begun = 0  # number of ranges whose reduction this pass has started

    def holds(self, parameter: nn.Parameter) -> bool:
        """Return whether a parameter is reduced here."""
        return self._reduction.holds(parameter)

    def begin(self) -> None:
        """Begin the last backward pass of a step."""
        self._missing = list(self._sizes)
        self._begun = 0

    def gradient_arrived(self, parameter: nn.Parameter) -> None:
        """Start the ranges that are complete; called when a parameter's gradient has been accumulated."""
        number = self._range_of.get(id(parameter))
        if number is None or not self._missing:
            return
        assert self._missing[number] > 0, "a parameter of one layer gets its gradient once in a backward pass"
        self._missing[number] -= 1
        while self._begun < len(self._missing) and self._missing[self._begun] == 0:
            self._reduction.finish_arrived()
            self._reduction.start(self._begun)
            self._begun += 1

    def finish(self) -> None:
        """Start the ranges that are left, wait for all, and fill the gradients with their averages."""
        for number in range(self._begun, len(self._sizes)):
            self._reduction.start(number)
        self._missing = []
        self._begun = 0
        self._reduction.finish()


def ranges_of_layers(
    layers: Sequence[nn.Module], takes_part: Callable[[nn.Parameter], bool], least: int
) -> list[list[nn.Parameter]]:
    """Return the parameters that are reduced together: those of consecutive layers, the last layers first.

    A parameter that several layers share is in none, since its gradient comes in parts.

    Args:
        layers: The layers in order.
        takes_part: Function that says whether a parameter is reduced.
        least: Elements from which a range is large enough to be sent.
    """
    uses = Counter(id(parameter) for layer in layers for parameter in layer.parameters())
    ranges: list[list[nn.Parameter]] = [[]]
    for layer in reversed(layers):
        if sum(parameter.numel() for parameter in ranges[-1]) >= least:
            ranges.append([])
        ranges[-1] += [p for p in layer.parameters() if uses[id(p)] == 1 and takes_part(p)]
    return [parameters for parameters in ranges if parameters]
