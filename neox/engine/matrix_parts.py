"""Which parts of matrices lie in the flat tensors that DeepSpeed hands to an optimizer of whole matrices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch.distributed as dist
from torch import Tensor, nn

from neox.engine.optimizer_tensors import Fragment, Names, OptimizerTensor
from neox.optim import MatrixPart, is_hidden
from neox.parallel import ParallelGrid


def matrix_parts(
    grid: ParallelGrid, model: nn.Module, names: Names, tensors: Sequence[OptimizerTensor]
) -> dict[Tensor, tuple[MatrixPart, ...]]:
    """Return the parts of hidden matrices in each tensor; all data ranks call it together.

    Args:
        grid: This rank's place.
        model: Its part of the network.
        names: Of the model's parameters.
        tensors: The optimizer's.
    """
    shapes = {names[id(p)]: tuple(getattr(p, "ds_shape", p.shape)) for p in model.parameters() if is_hidden(p)}
    mine = [[part for part in tensor.fragments if (part.index, part.name) in shapes] for tensor in tensors]
    ranks = [mine] * grid.dp_size
    if grid.dp_size > 1:
        dist.all_gather_object(ranks, mine, group=grid.dp_group)

    def parts(number: int) -> Iterator[MatrixPart]:
        holders: dict[tuple[int, str], dict[int, Fragment]] = {}
        for rank, of_rank in enumerate(ranks):
            for part in (part for part in of_rank[number] if part.length):
                holders.setdefault((part.index, part.name), {})[rank] = part
        for key in sorted(holders):  # in one order on all ranks, which gather together
            shared, here = len(holders[key]) > 1, holders[key].get(grid.dp_rank)
            first, length, start = (here.first, here.length, here.start) if here else (0, 0, 0)
            if shared or here:
                yield MatrixPart(shapes[key], first, length, start, grid.dp_group if shared else None)

    return {tensor.tensor: tuple(parts(number)) for number, tensor in enumerate(tensors)}
