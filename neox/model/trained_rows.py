"""Training of some rows of a parameter: gradients of all others are zero."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from neox.architecture import ParameterSpec
from neox.parallel import ParallelGrid


def train_only_rows(parameter: nn.Parameter, spec: ParameterSpec, grid: ParallelGrid) -> None:
    """Let only the rows of `spec.trained_rows` have gradients; does nothing for a parameter that is trained whole.

    The gradient is masked before it is accumulated and divided over data ranks, so that no ZeRO stage sees the others.

    Args:
        parameter: This tensor rank's part of the parameter.
        spec: The parameter on paper.
        grid: Process groups.
    """
    if spec.trained_rows is None or not spec.trained:
        return
    rows = spec.shape[0]
    first_here = 0
    if spec.partition_dim == 0:
        rows //= grid.tp_size
        first_here = grid.tp_rank * rows
    first, number = spec.trained_rows
    start = min(rows, max(0, first - first_here))
    stop = min(rows, max(0, first + number - first_here))

    def masked(gradient: Tensor) -> Tensor:
        kept = torch.zeros_like(gradient)
        kept[start:stop] = gradient[start:stop]
        return kept

    parameter.register_hook(masked)
