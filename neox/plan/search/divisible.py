"""Starting point of a search for layouts if the configured degrees and batch do not fit the number of GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd
from typing import Any

from neox.config.neox_config import NeoXConfig, yaml_text
from neox.plan.batches.batch import BATCH_KEYS, MICRO, STEPS, TOTAL, solve_batch
from neox.plan.ranks.topology import model_ranks_of, solve_grid
from neox.plan.search.fit import nested_keys
from neox.problems import Problem

TENSOR_DEGREES = (1, 2, 4, 8)
"""Tensor parallel degrees that a search tries."""


def divisible_config(config: NeoXConfig, world_size: int) -> tuple[NeoXConfig, dict[str, Any]]:
    """Return a configuration with the same batch size that is valid on a number of ranks, as the start of a search.

    Args:
        config: What the user asked for.
        world_size: Number of ranks.

    Returns:
        The configuration and the keys that differ from the given one, with their values. The given configuration is
        returned if it is valid on these ranks, and also if no degrees are.
    """
    if config.deepspeed.train_batch_size is None and config.deepspeed.train_micro_batch_size_per_gpu is None:
        return config, {}
    if _divides(config, world_size):
        return config, {}
    total = _samples_of_step(config, world_size)
    for pp_size, tp_size in _degrees(config, world_size):
        dp_size = world_size // (pp_size * tp_size)
        if total % dp_size or dp_size % config.parallelism.expert_model_parallel_size:
            continue
        changes: dict[str, Any] = {"pipe_parallel_size": pp_size, "model_parallel_size": tp_size}
        if config.parallelism.pipeline_schedule != "1f1b":
            changes |= {"pipeline_schedule": "1f1b", "virtual_stages": None}
        changes |= {TOTAL: total, MICRO: 1, STEPS: total // dp_size}
        if pp_size > 1 and config.deepspeed.zero_optimization.stage > 1:  # the pipeline engine supports up to ZeRO 1
            changes["zero_optimization.stage"] = 1
        changed = {key: value for key, value in changes.items() if config.value(key) != value}
        texts = {key: yaml_text(value) for key, value in changed.items()}
        return config.updated(nested_keys(config, texts.items())), changed
    return config, {}


def _divides(config: NeoXConfig, world_size: int) -> bool:
    problems: list[Problem] = []
    grid = solve_grid(config, world_size, problems)
    return grid is not None and solve_batch(config, grid.data_size, problems) is not None


def _degrees(config: NeoXConfig, world_size: int) -> Iterator[tuple[int, int]]:
    """Yield pipeline and tensor degrees that divide the ranks, those with few stages first."""
    for pp_size in range(1, (config.model.num_layers or 1) + 1):
        for tp_size in TENSOR_DEGREES:
            if world_size % (pp_size * tp_size) == 0:
                yield pp_size, tp_size


def _samples_of_step(config: NeoXConfig, world_size: int) -> int:
    """Return the samples of a step: as configured, or scaled so that each GPU has about as many as the keys imply.

    GPUs too few for a copy of the model in the configured degrees keep the samples of one copy.
    """
    total, micro, steps = (config.value(key) for key in BATCH_KEYS)
    if total is not None:
        return int(total)
    model_ranks = model_ranks_of(config)
    wanted = micro * (steps or 1) * max(1.0, world_size / model_ranks)
    divisor = world_size // gcd(world_size, model_ranks)
    return max(1, round(wanted / divisor)) * divisor
