"""Sizes of a run's checkpoints on disk."""

from __future__ import annotations

from neox.plan.memory.estimate import memory_of_features
from neox.plan.memory.parameters import count_parameters
from neox.plan.memory.zero import sharding_of
from neox.plan.run_plan import RunPlan


def checkpoint_bytes(plan: RunPlan) -> int:
    """Return the bytes of the tensors in one checkpoint of all ranks: weights, optimizer states, averages.

    Weights are written once for each tensor rank of a stage. The others are too, or by each data rank if data ranks
    divide them.
    """
    run = plan.workload
    total = 0
    for stage in plan.stages:
        count = count_parameters(run, stage)
        sharding = sharding_of(run)(run, count)
        writers = run.layout.dp_size if sharding.shards_states else 1
        of_tensor_rank = run.bytes_per_number * count.whole + writers * memory_of_features(sharding).saved
        if not plan.config.checkpoint.no_save_optim:
            of_tensor_rank += writers * sharding.all_states()
        total += run.layout.tp_size * of_tensor_rank
    return total


def kept_checkpoints(plan: RunPlan) -> int:
    """Return how many of a run's checkpoints are on disk at its end."""
    written = len(plan.save_iterations)
    limit = plan.config.checkpoint.keep_last_n_checkpoints
    return written if limit is None else min(written, limit)
