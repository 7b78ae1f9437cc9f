"""What the layer plan says about the update of each parameter, as marks on the module's parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from neox.architecture import LayerEntry, ParameterSpec
from neox.parallel import (
    ParallelGrid,
    mark_decay,
    mark_divided_experts,
    mark_group,
    mark_hidden,
    mark_lr_factor,
    mark_split,
)


def mark_parameters(layer: nn.Module, entry: LayerEntry, grid: ParallelGrid, *, width_multiplier: float = 1.0) -> None:
    """Freeze and mark the parameters of a layer: what optimizer, clipping and DeepSpeed read of each.

    A constructor's marks are gone if `to_empty` has made new parameters.

    Args:
        layer: The module.
        entry: Its entry in the layer plan.
        grid: Process groups.
        width_multiplier: muP's m: matrices of blocks get 1 / m of the learning rate, as Adam needs it.
    """
    parameters = dict(layer.named_parameters())
    for spec in entry.parameters:
        parameter = parameters[spec.name]
        parameter.requires_grad_(spec.trained)
        mark_split(parameter, spec.partition_dim is not None and grid.tp_size > 1)
        mark_decay(parameter, spec.is_matrix)
        mark_group(parameter, spec.lr_factor, spec.weight_decay)
        mark_hidden(parameter, entry.is_hidden(spec))
        if spec.experts:
            mark_divided_experts(parameter, grid)
        if width_multiplier != 1.0 and entry.is_hidden(spec):
            mark_lr_factor(parameter, 1.0 / width_multiplier)
        _train_only_rows(parameter, spec, grid)


def _train_only_rows(parameter: nn.Parameter, spec: ParameterSpec, grid: ParallelGrid) -> None:
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
