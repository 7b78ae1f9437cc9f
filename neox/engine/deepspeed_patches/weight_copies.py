"""Process groups of hpZ: second copies of ZeRO 3's weights within a node (ZeRO++, `zero_hpz_partition_size`)."""

from __future__ import annotations

import torch.distributed as dist
from deepspeed.utils import groups

from neox.parallel import ParallelGrid


def copy_group(grid: ParallelGrid, size: int) -> dist.ProcessGroup | None:
    """Create the groups over which the second copies of the weights are sharded; all ranks call it together.

    DeepSpeed groups neighbouring global ranks, so with tensor parallelism a group would mix shards of different tensor
    ranks. It also creates the groups in each `zero.Init` and refuses to create them twice, but a large model is built
    layer by layer, with several `zero.Init`. The groups created here consist of neighbouring data ranks. DeepSpeed
    reads this rank's group from a variable of its module.

    Args:
        grid: This rank's position in the parallel grid.
        size: Number of data ranks in a group; 1 disables the copies.

    Returns:
        This rank's group; None if the copies are disabled.
    """
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
    if size == 1:
        return None
    for ranks in grid.topology.neighbouring_groups(size):
        group = dist.new_group(ranks)
        if grid.rank in ranks:
            groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = group
    return groups._ZERO_PARAM_INTRA_PARALLEL_GROUP
