"""The start of a rank that runs a model: the other ranks, and one checkpoint for all of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from neox.config import RunPlan
from neox.engine import from_first_rank, initialize_distributed
from neox.log import setup_logging
from neox.parallel import ParallelGrid


def start_ranks(plan: RunPlan, prepare: Callable[[], Path]) -> tuple[ParallelGrid, torch.device, Path]:
    """Join the other ranks and return this one's grid, its device, and the checkpoint that rank 0's `prepare` returns.

    A NeoXError of `prepare` is raised on all ranks. A lone process needs no group: none is made.
    """
    if plan.grid.world_size == 1:
        return ParallelGrid.single(), torch.device("cuda" if torch.cuda.is_available() else "cpu"), prepare()
    grid, device = initialize_distributed(plan)
    setup_logging(grid.rank)
    return grid, device, from_first_rank(prepare)
