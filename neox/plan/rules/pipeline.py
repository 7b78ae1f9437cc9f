"""Rules of pipeline schedules that depend on the batch."""

from __future__ import annotations

from collections.abc import Iterator

from neox.config.neox_config import NeoXConfig
from neox.plan.batches.batch import STEPS, BatchPlan
from neox.plan.batches.batch_schedule import RAMP_KEY, BatchSchedule
from neox.plan.ranks.pipeline_schedules import PIPELINE_SCHEDULES
from neox.plan.ranks.topology import Topology
from neox.problems import Problem


def schedule_problems(config: NeoXConfig, grid: Topology | None, batch: BatchPlan) -> Iterator[Problem]:
    """Yield that a step has fewer micro batches than the pipeline schedule needs."""
    key = "pipeline_schedule"
    if grid is None or grid.pp_size == 1:
        return
    least = PIPELINE_SCHEDULES[config.parallelism.pipeline_schedule].least_micro_batches(grid.pp_size)
    fewest = batch.gradient_accumulation_steps
    if fewest < least:
        degree = config.describe_setting("pipe_parallel_size")
        rule = f"needs at least {least} micro batches in a step with {degree}, not {fewest}; use interleaved, or raise "
        yield config.problem(key, f"{rule}{STEPS}", STEPS, "pipe_parallel_size")
        return
    if config.schedule.rampup_batch_size is None:
        return
    smallest = BatchSchedule.of(config, batch).batch_size(0)
    fewest = smallest * batch.gradient_accumulation_steps // batch.train_batch_size
    if fewest < least:
        first = config.describe_setting(RAMP_KEY)
        rule = f"needs at least {least} micro batches in each step; {first} begins with {fewest}"
        yield config.problem(key, rule, RAMP_KEY)
