"""Work that several copies of a model share: each takes some of the items, and all get all results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch.distributed as dist

from neox.parallel import ParallelGrid

Item = TypeVar("Item")
Result = TypeVar("Result")


def over_replicas(
    items: Sequence[Item], work: Callable[[Sequence[Item]], Sequence[Result]], grid: ParallelGrid
) -> list[Result]:
    """Return `work(items)`, of which each data-parallel rank computes its share; results in the order of the items.

    work: maps items to as many picklable results; it may talk to the ranks of its own copy of the model.
    """
    mine = list(work(items[grid.dp_rank :: grid.dp_size]))
    if grid.dp_size == 1:
        return mine
    shares: list[list[Result]] = [[] for _ in range(grid.dp_size)]
    dist.all_gather_object(shares, mine, group=grid.dp_group)
    return [shares[n % grid.dp_size][n // grid.dp_size] for n in range(len(items))]
