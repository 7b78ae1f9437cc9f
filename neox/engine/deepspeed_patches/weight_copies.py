"""Second copies of ZeRO 3's weights in groups of neighbouring data ranks (hpZ of ZeRO++, `zero_hpz_partition_size`)."""

from __future__ import annotations

import torch.distributed as dist
from deepspeed.utils import groups

from neox.parallel import ParallelGrid


def copy_group(grid: ParallelGrid, size: int) -> dist.ProcessGroup | None:
    """Create the groups that divide second copies of the weights; all ranks call it together.

    DeepSpeed creates groups of neighbouring ranks of any kind, so that with tensor ranks a group would mix their parts.
    It creates them in each `Init`, and refuses the second one, although a large model is built layer by layer. Here the
    groups are of neighbouring data ranks. DeepSpeed finds this rank's in its module variable.

    Args:
        grid: This rank's place.
        size: Data ranks of a group; 1 for no copies.

    Returns:
        This rank's group; None for no copies.
    """
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
    if size == 1:
        return None
    for ranks in grid.topology.neighbouring_groups(size):
        group = dist.new_group(ranks)
        if grid.rank in ranks:
            groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = group
    return groups._ZERO_PARAM_INTRA_PARALLEL_GROUP
