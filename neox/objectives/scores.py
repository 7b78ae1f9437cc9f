"""Scores of an objective: totals with counts until a step or an evaluation is over, then one division.

A micro batch gives a row [total, count] for each score. Rows are combined over micro batches, ranks and evaluated
batches; `ScoreTable.finish` turns them into numbers:

    reduction            total                         combined by         number
    none (a mean)        sum of values                 sum                 total / count
    min, max             smallest or largest value     min or max          total
    LinearCombination    no row                        -                   from the numbers of other scores

Counts are summed. A score whose count is 0 has no number (None): nothing was there to be counted.

A mean of means would depend on how a batch is cut: answers, labels and pairs are spread unevenly over micro batches.

Legend: K scores with rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from neox.parallel import ParallelGrid


@dataclass(frozen=True)
class LinearCombination:
    """Score that follows from other scores of the same step or evaluation; it has no number if one of them has none.

    Attributes:
        factors: Factor of each other score by name.
    """

    factors: Mapping[str, float]


Reduction = Literal["min", "max"] | LinearCombination
Row = tuple[Tensor, Tensor]
"""Total and count of a score in a micro batch, as scalars."""


class Scored(Protocol):
    """The part of an `Objective` that names its scores."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the scores."""
        ...

    @property
    def reductions(self) -> Mapping[str, Reduction]:
        """Reductions of the scores that are not means."""
        ...


def pack_scores(loss: Tensor, rows: Iterable[Row]) -> Tensor:
    """Return what an objective computes of a micro batch as one vector, [1 + 2 K].

    Args:
        loss: Loss that is trained, a scalar in fp32; only it has a gradient.
        rows: Row of each score, in the order of `ScoreTable.rows`.
    """
    numbers = [loss]
    for total, count in rows:
        numbers += [total.detach().float(), count.detach().float()]
    return torch.stack(numbers)


def add_rows(packed: Tensor, loss: Tensor, rows: Iterable[Row]) -> Tensor:
    """Return packed scores with another loss, and with further rows after the first ones."""
    return torch.cat((loss.unsqueeze(0), packed[1:].detach(), pack_scores(loss.detach(), rows)[1:]))


def unpack_rows(packed: Tensor) -> Tensor:
    """Return the rows [K, 2] of packed scores."""
    return packed[1:].detach().view(-1, 2)


class ScoreTable:
    """Names and reductions of an objective's scores, and the arithmetic on their rows.

    Args:
        objective: The objective.

    Attributes:
        names: Names of all scores, the trained loss first.
        rows: Names of the scores that have a row, in order: all but linear combinations.
    """

    def __init__(self, objective: Scored) -> None:
        self.names = objective.names
        self.reductions = dict(objective.reductions)
        self.rows = tuple(name for name in self.names if not isinstance(self._reduction(name), LinearCombination))
        self._min = [row for row, name in enumerate(self.rows) if self._reduction(name) == "min"]
        self._max = [row for row, name in enumerate(self.rows) if self._reduction(name) == "max"]

    def _reduction(self, name: str) -> Reduction | None:
        return self.reductions.get(name)

    def empty(self, device: torch.device | None = None) -> Tensor:
        """Return rows that count nothing [K, 2]."""
        rows = torch.zeros(len(self.rows), 2, device=device)
        for row in self._min:
            rows[row, 0] = float("inf")
        for row in self._max:
            rows[row, 0] = float("-inf")
        return rows

    def combine(self, first: Tensor, second: Tensor) -> Tensor:
        """Combine the rows of two parts of a step or an evaluation [K, 2]."""
        combined = first + second
        for row in self._min:
            combined[row, 0] = torch.minimum(first[row, 0], second[row, 0])
        for row in self._max:
            combined[row, 0] = torch.maximum(first[row, 0], second[row, 0])
        return combined

    def all_reduce(self, rows: Tensor, grid: ParallelGrid) -> Tensor:
        """Combine rows [K, 2] over data ranks; all ranks with the same weights call it together.

        Context ranks hold parts of the same samples. Each of them reports C times its part, or C ranks report the same
        whole, so that sums over C of them are divided by C.
        """
        if grid.dp_size == 1:
            return rows
        summed = rows.clone()
        dist.all_reduce(summed, group=grid.dp_group)
        summed /= grid.cp_size
        if self._min or self._max:
            # Row by row: indices of several rows would be copied from the host, which waits for the device.
            largest = torch.stack([-rows[row, 0] for row in self._min] + [rows[row, 0] for row in self._max])
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=grid.dp_group)
            for number, row in enumerate(self._min):
                summed[row, 0] = -largest[number]
            for number, row in enumerate(self._max, start=len(self._min)):
                summed[row, 0] = largest[number]
        return summed

    def finish(self, rows: Sequence[Sequence[float]]) -> dict[str, float | None]:
        """Return the number of each score by name; None where nothing was counted."""
        measured: dict[str, float | None] = {}
        for name, (total, count) in zip(self.rows, rows, strict=True):
            measured[name] = None
            if count != 0:  # a count that is NaN makes the score NaN
                measured[name] = total / count if self._reduction(name) is None else total
        return {name: self._number(name, measured) for name in self.names}

    def _number(self, name: str, measured: Mapping[str, float | None]) -> float | None:
        reduction = self._reduction(name)
        if not isinstance(reduction, LinearCombination):
            return measured[name]
        result = 0.0
        for other, factor in reduction.factors.items():
            number = self._number(other, measured)
            if number is None:
                return None
            result += factor * number
        return result
