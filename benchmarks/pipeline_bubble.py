"""Measure the bubble of pipeline schedules with stages that sleep: python benchmarks/pipeline_bubble.py

Every rank is a process with gloo, and runs the engine's own schedule and messages. A forward pass of a stage's blocks
sleeps for a given time, and a backward pass for twice as long, so that two cores can be eight ranks. Each schedule runs
5 steps; the median of the last 4 is compared with the simulation (`neox.plan.time.simulation`). A step without sleeping
is measured, too: Python, DeepSpeed, a tiny network and messages on the cores at hand, which the simulation leaves out.
Writes benchmarks/results/pipeline_bubble-DATE.json.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from neox.plan.time.simulation import simulate
from tests.distributed.spawn import run_ranks
from tests.distributed.training_runs import batches, tiny_plan

ROOT = Path(__file__).resolve().parent.parent
STEPS = 5
LAYOUTS = [("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("dualpipev", 2)]


class _Sleep(torch.autograd.Function):
    """Sleeps in its forward pass, and twice as long in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return grad, None


def add_sleep(engine: Any, seconds: float) -> None:
    """Let the blocks of a stage sleep together so many seconds in a forward pass, and twice as long backward."""
    blocks = engine.deepspeed_engine.module.stage.blocks

    def sleep(block: nn.Module, given: Any, result: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        x, aux = result
        return _Sleep.apply(x, seconds / len(blocks)), aux

    for block in blocks:
        block.register_forward_hook(sleep)


def step_seconds(plan: Any, seconds: float) -> float:
    """Return the median time of a step on this rank, whose blocks sleep together `seconds` in a forward pass."""
    from neox.engine import initialize_distributed, initialize_engine

    grid, device = initialize_distributed(plan)
    engine = initialize_engine(plan, grid, device)
    add_sleep(engine, seconds)
    data = batches(plan, grid.dp_rank)
    times = []
    for _ in range(STEPS):
        torch.distributed.barrier()
        start = time.perf_counter()
        engine.train_batch(data)
        times.append(time.perf_counter() - start)
    return median(times[1:])


def measure(stages: int, micro_batches: int, seconds: float) -> list[dict[str, Any]]:
    """Measure each schedule; return one row for each."""
    rows = []
    for schedule, ranges in LAYOUTS:
        keys = {"pipeline_schedule": schedule}
        if schedule == "interleaved":
            keys["virtual_stages"] = ranges
        plan = tiny_plan(
            stages,
            pp=stages,
            num_layers=4 * stages,
            train_batch_size=micro_batches,
            no_weight_tying=True,
            optimizer={"type": "SGD", "params": {"lr": 0.001}},
            **keys,
        )
        overhead = max(run_ranks(stages, step_seconds, plan, 0.0, timeout=600))
        found = max(run_ranks(stages, step_seconds, plan, seconds, timeout=600))
        forward = [[seconds / ranges] * ranges for _ in range(stages)]
        backward = [[2 * seconds / ranges] * ranges for _ in range(stages)]
        timeline = simulate(schedule, forward, backward, micro_batches)
        row = {
            "schedule": schedule,
            "ranges": ranges,
            "stages": stages,
            "micro_batches": micro_batches,
            "simulated": timeline.length,
            "measured": found,
            "without_sleep": overhead,
            "error": found / timeline.length - 1,
            "bubble_simulated": timeline.bubble,
            "bubble_measured": 1 - 3 * seconds * micro_batches / found,
        }
        print(row, flush=True)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=0.4, help="forward pass of a micro batch through a stage")
    arguments = parser.parse_args()
    rows = measure(arguments.stages, arguments.micro_batches, arguments.seconds)
    today = datetime.date.today().isoformat()
    result = {"date": today, "machine": platform.machine(), "seconds": arguments.seconds, "rows": rows}
    path = ROOT / "benchmarks" / "results" / f"pipeline_bubble-{today}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
