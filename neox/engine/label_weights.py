"""Weights of the labels of a step, which depend on all micro batches of all data ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist

from neox.objectives import LOSS_NORMALIZATIONS, Batch, LossNormalization, Objective
from neox.parallel import ParallelGrid
from neox.plan import RunPlan


class EvaluationResult(NamedTuple):
    """Scores of some micro batches.

    Attributes:
        scores: The objective's mean scores over all data ranks, by name; the trained loss comes first.
        amount: What their losses were divided by, which is their weight in a mean over several results.
    """

    scores: Mapping[str, float]
    amount: float


class WeightedBatches(NamedTuple):
    """Micro batches whose labels have weights.

    Attributes:
        batches: The micro batches.
        amount: What their losses are divided by over all data ranks; their number if each has its own divisor.
    """

    batches: Iterator[Batch]
    amount: float


class LabelWeights:
    """Replaces the mask of labels in micro batches by weights, as `loss_normalization` says.

    Args:
        normalization: What losses are divided by.
        field: Name of the mask in a batch.
        grid: This rank's grid.
        device: Device of the model, on which data ranks add up their numbers of labels.
    """

    def __init__(self, normalization: LossNormalization, field: str, grid: ParallelGrid, device: torch.device) -> None:
        self._normalization = normalization
        self._field = field
        self._grid = grid
        self._device = device

    @classmethod
    def of(cls, plan: RunPlan, objective: Objective, grid: ParallelGrid, device: torch.device) -> LabelWeights:
        """Return the weights of a run."""
        return cls(LOSS_NORMALIZATIONS[plan.loss_normalization], objective.label_mask, grid, device)

    def of_step(self, batches: Iterator[Batch], count: int) -> WeightedBatches:
        """Return the next `count` micro batches of this data rank; all ranks of the data group call it together."""
        if self._normalization.amount(torch.ones(1, 1)) is None:
            weighted = (self._weighted(next(batches), 1.0) for _ in range(count))
            return WeightedBatches(weighted, float(count * self._grid.data_size))
        read = [next(batches) for _ in range(count)]
        amount = self._total(read)
        share = count * self._grid.data_size / max(1.0, amount)
        return WeightedBatches((self._weighted(batch, share) for batch in read), amount)

    def _total(self, read: list[Batch]) -> float:
        """Return the amount of micro batches over all data ranks."""
        total = torch.zeros(1, dtype=torch.float64)
        for batch in read:
            amount = self._normalization.amount(batch[self._field].float())
            assert amount is not None
            total += amount
        if self._grid.dp_size > 1:
            total = total.to(self._device)
            dist.all_reduce(total, group=self._grid.dp_group)
            total /= self._grid.cp_size  # context ranks read the same samples
        return float(total)

    def _weighted(self, batch: Batch, share: float) -> Batch:
        weights = self._normalization.weights(batch[self._field].float(), share)
        # Engines average over context ranks, too, but each computes only the losses of its own tokens.
        weights = weights * self._grid.cp_size
        return {**batch, self._field: weights}
