"""Measure how much of a slow gradient reduction hides behind backward passes: python benchmarks/reduction_overlap.py

Two pipeline stages of two data ranks each, as processes with gloo. Blocks sleep (`benchmarks.pipeline_bubble`), and a
reduction over data ranks takes a time in proportion to its elements, in which the rank can compute. A step is measured
with reduction at its end and with reduction range by range. What could be hidden follows from the simulation: a range's
reduction may run from its last backward pass on, one reduction after the other. Writes
benchmarks/results/reduction_overlap-DATE.json.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.pipeline_bubble import add_sleep
from neox.plan.time.simulation import Timeline, simulate
from tests.distributed.spawn import run_ranks
from tests.distributed.training_runs import batches, tiny_plan

ROOT = Path(__file__).resolve().parent.parent
STAGES = 2
STEPS = 5


class _SlowWork:
    """A collective that ends at a given time."""

    def __init__(self, work: Any, end: float) -> None:
        self._work = work
        self._end = end

    def wait(self) -> None:
        self._work.wait()
        time.sleep(max(0.0, self._end - time.perf_counter()))


@contextmanager
def slow_reductions(group: Any, seconds_per_element: float) -> Iterator[None]:
    """Let sums over a group take a time in proportion to their elements, one after the other."""
    original = dist.all_reduce
    busy_until = 0.0

    def slow(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal busy_until
        if kwargs.get("group") is not group or tensor.numel() < 100:
            return original(tensor, *args, **kwargs)
        is_async = kwargs.pop("async_op", False)
        busy_until = max(busy_until, time.perf_counter()) + seconds_per_element * tensor.numel()
        work = _SlowWork(original(tensor, *args, **kwargs, async_op=True), busy_until)
        if is_async:
            return work
        work.wait()
        return None

    dist.all_reduce = slow
    try:
        yield
    finally:
        dist.all_reduce = original


def step_seconds(plan: Any, forward: float, reduction: float, *, overlaps: bool) -> float:
    """Return the median time of a step on this rank.

    Args:
        plan: The run.
        forward: Seconds of a stage's forward pass of a micro batch.
        reduction: Seconds in which all gradients of this rank are reduced.
        overlaps: Whether ranges are reduced during other passes.
    """
    from neox.engine import initialize_distributed, initialize_engine

    grid, device = initialize_distributed(plan)
    engine = initialize_engine(plan, grid, device)
    pipeline = engine.deepspeed_engine
    add_sleep(engine, forward)
    if not overlaps:
        pipeline._reduction = None
    elements = sum(parameter.numel() for parameter in pipeline.module.parameters())
    data = batches(plan, grid.dp_rank)
    times = []
    with slow_reductions(pipeline.mpu.get_data_parallel_group(), reduction / elements):
        for _ in range(STEPS):
            dist.barrier()
            start = time.perf_counter()
            engine.train_batch(data)
            dist.barrier()
            times.append(time.perf_counter() - start)
    return median(times[1:])


def ideal_lengths(timeline: Timeline, reduction: float) -> tuple[float, float]:
    """Return the length of a step with reduction at its end, and with each range's as early as it can be."""
    at_end = []
    early = []
    for passes in timeline.passes:
        ends = {timed.work.chunk: timed.end for timed in passes if timed.work.backward}
        at_end.append(max(ends.values()) + reduction)
        free = 0.0
        for end in sorted(ends.values()):
            free = max(free, end) + reduction / len(ends)
        early.append(free)
    return max(at_end), max(early)


def measure(schedule: str, micro_batches: int, forward: float, reduction: float) -> dict[str, Any]:
    """Measure a schedule with two ranges of layers on each stage."""
    keys = {"pp": STAGES, "num_layers": 8, "train_batch_size": 2 * micro_batches, "no_weight_tying": True}
    plan = tiny_plan(2 * STAGES, **keys, pipeline_schedule=schedule)
    at_end = max(run_ranks(2 * STAGES, _at_end, plan, forward, reduction))
    early = max(run_ranks(2 * STAGES, _early, plan, forward, reduction))
    durations = [[forward / 2] * 2 for _ in range(STAGES)]
    twice = [[forward] * 2 for _ in range(STAGES)]
    ideal_end, ideal_early = ideal_lengths(simulate(schedule, durations, twice, micro_batches), reduction)
    return {
        "schedule": schedule,
        "micro_batches": micro_batches,
        "forward": forward,
        "reduction": reduction,
        "at_end": at_end,
        "range_by_range": early,
        "could_be_hidden": ideal_end - ideal_early,
        "hidden": at_end - early,
        "share": (at_end - early) / (ideal_end - ideal_early),
    }


def _at_end(plan: Any, forward: float, reduction: float) -> float:
    return step_seconds(plan, forward, reduction, overlaps=False)


def _early(plan: Any, forward: float, reduction: float) -> float:
    return step_seconds(plan, forward, reduction, overlaps=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--forward", type=float, default=0.4, help="seconds of a stage's forward pass")
    parser.add_argument("--reduction", type=float, default=1.2, help="seconds of the reduction of all gradients")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for schedule in ("interleaved", "dualpipev"):
        row = measure(schedule, arguments.micro_batches, arguments.forward, arguments.reduction)
        print(row, flush=True)
        rows.append(row)
    today = datetime.date.today().isoformat()
    path = ROOT / "benchmarks" / "results" / f"reduction_overlap-{today}.json"
    path.write_text(json.dumps({"date": today, "machine": platform.machine(), "rows": rows}, indent=1) + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
