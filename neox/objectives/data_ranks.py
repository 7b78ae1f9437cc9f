"""Numbers over the values that the micro batches of all data ranks hold together."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from neox.parallel import ParallelGrid


def mean_over_data_ranks(values: Tensor, counts: Tensor, grid: ParallelGrid) -> Tensor:
    """Return the mean of the values whose `counts` is 1 (not 0); 0 if there are none."""
    totals = torch.stack(((values * counts).sum(), counts.sum()))
    if grid.dp_size > 1:
        dist.all_reduce(totals, group=grid.dp_group)
    return totals[0] / totals[1].clamp(min=1)


def largest_over_data_ranks(values: Tensor, grid: ParallelGrid) -> Tensor:
    """Return the largest value; -inf if there are none."""
    lowest = values.new_full((1,), float("-inf"))
    largest = torch.cat((values.flatten(), lowest)).max()
    if grid.dp_size > 1:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=grid.dp_group)
    return largest
