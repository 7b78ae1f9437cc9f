"""The grid under the names that DeepSpeed asks a "model parallel unit" for."""

from __future__ import annotations

import torch.distributed as dist

from neox.parallel import ParallelGrid


class GridMPU:
    """Adapter for a body without pipeline stages; a pipeline brings DeepSpeed's own, of the same rank order."""

    def __init__(self, grid: ParallelGrid) -> None:
        assert grid.pp_size == 1, grid
        self._grid = grid

    def get_model_parallel_rank(self) -> int:
        return self._grid.tp_rank

    def get_model_parallel_world_size(self) -> int:
        return self._grid.tp_size

    def get_model_parallel_group(self) -> dist.ProcessGroup | None:
        return self._grid.tp_group

    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_group = get_model_parallel_group
    get_slice_parallel_rank = get_model_parallel_rank
    get_slice_parallel_world_size = get_model_parallel_world_size

    def get_pipeline_model_parallel_rank(self) -> int:
        return 0

    def get_pipeline_model_parallel_world_size(self) -> int:
        return 1

    get_pipe_parallel_rank = get_pipeline_model_parallel_rank
    get_pipe_parallel_world_size = get_pipeline_model_parallel_world_size

    def get_pipe_parallel_group(self) -> dist.ProcessGroup | None:
        return self._grid.pp_group

    def get_data_parallel_rank(self) -> int:
        return self._grid.dp_rank

    def get_data_parallel_world_size(self) -> int:
        return self._grid.dp_size

    def get_data_parallel_group(self) -> dist.ProcessGroup | None:
        return self._grid.dp_group

    def get_global_rank(self) -> int:
        return self._grid.rank
