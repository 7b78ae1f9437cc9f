"""ZeRO 3 of experts that data ranks divide.

A parameter of experts is sharded over the ranks that hold the same experts. With four data ranks, of which two
neighbours divide four experts:

    data rank        0             1             2             3
    experts          0 1           2 3           0 1           2 3
    shard            first half    first half    second half   second half     groups {0, 2} and {1, 3}

DeepSpeed has this for layers of its own (AutoEP): a parameter may name another group than that of all data ranks, and
gradients are still divided by the number of all data ranks. It looks the expert parallel group up in its module, by a
name that only its own layers register.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from neox.engine.deepspeed_patches.file_states import SwappedStage3
from neox.parallel import ParallelGrid, holds_divided_experts


def shard_over_same_experts(layer: nn.Module, grid: ParallelGrid) -> None:
    """Tell `zero.Init` over which ranks to shard the experts of a layer."""
    parameter: Any  # with DeepSpeed's attributes
    for parameter in layer.parameters():
        if holds_divided_experts(parameter):
            parameter.ds_zero_partition_process_group = grid.edp_group


class ExpertStage3(SwappedStage3):
    """DeepSpeed's ZeRO 3 with experts that data ranks divide."""

    def _autoep_expert_parallel_group(self, params: Sequence[Tensor]) -> dist.ProcessGroup | None:
        """Return the ranks that divide the experts among the parameters; None for other parameters."""
        if not holds_divided_experts(params[0]):  # parameters of one partition group
            return None
        group: dist.ProcessGroup = self.optimizer.expert_groups.divided
        return group

    def _grad_norm_counts_every_rank(self, params: Sequence[Tensor], process_group: dist.ProcessGroup) -> bool:
        """Return whether the group of the parameters contains all tensor ranks; that of experts never does here."""
        if holds_divided_experts(params[0]):
            return False
        counts: bool = super()._grad_norm_counts_every_rank(params, process_group)
        return counts
