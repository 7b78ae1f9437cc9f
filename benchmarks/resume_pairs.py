"""Every layout loads what every other one saved: how far the losses are from the undisturbed run's.

    benchmarks/resume_pairs.py [--worlds 1 2 3 4] [--steps 20] [--out FILE.json]

A layout is (pp, mp, dp, ZeRO stage); all legal ones of each number of ranks are trained for three steps, saved, and go
on for `--steps`; then each loads each of those checkpoints and does the same steps. fp32, tied embeddings, clipping on.
Prints the largest relative difference of a loss by numbers of ranks, and the worst pair. An engine is made once a
layout and takes up one checkpoint after the other, weights and all, as a resumed run's does.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from neox.plan import RunPlan
from tests.distributed.spawn import run_ranks
from tests.distributed.training_runs import FULL_MATRIX, batches, legal_layouts, tiny_plan

LIMIT = 1e-6  # relative, over the steps
SAVED_AT = 3  # steps before the save
AT_ONCE = 6  # layouts in one set of processes: each leaves its process groups behind


def layouts_of(world: int) -> list[dict[str, Any]]:
    """Legal layouts of that many ranks."""
    return [{**layout, "world": world} for layout in legal_layouts(world)]


def name(layout: dict[str, Any]) -> str:
    dp = layout["world"] // (layout["pp"] * layout["mp"])
    return f"pp{layout['pp']} mp{layout['mp']} dp{dp} zero{layout['zero']}"


def plan_of(layout: dict[str, Any], steps: int, save: str) -> RunPlan:
    """The layout's plan: few and large micro batches, which changes the rounding of sums alone."""
    world, pp, mp = layout["world"], layout["pp"], layout["mp"]
    micro = FULL_MATRIX["train_batch_size"] * pp * mp // world // (2 if pp > 1 else 1)
    keys = {**FULL_MATRIX, "train_micro_batch_size_per_gpu": micro, "train_iters": SAVED_AT + steps + 10}
    keys |= {"lr_decay_iters": 100, "save": save}
    return tiny_plan(world, pp=pp if pp > 1 else 0, mp=mp, zero=layout["zero"], **keys)


def save_and_go_on(plans: Sequence[RunPlan], steps: int) -> list[list[float]]:
    """Train and save under each plan; the losses of the steps after the save."""
    from neox.engine import initialize_distributed, initialize_engine, save_checkpoint

    rows = []
    for plan in plans:
        grid, device = initialize_distributed(plan)
        engine = initialize_engine(plan, grid, device)
        data = batches(plan, grid.dp_rank)
        for _ in range(SAVED_AT):
            engine.train_batch(data)
        save_checkpoint(engine, plan.config.checkpoint.save)
        rows.append([engine.train_batch(data).loss for _ in range(steps)])
    return rows


def load_each(plans: Sequence[RunPlan], saves: Sequence[str], steps: int) -> list[list[list[float]]]:
    """For each plan and each checkpoint directory, the losses of the steps after loading it."""
    from neox.engine import initialize_distributed, initialize_engine
    from neox.engine.checkpoints.loading import resume
    from neox.engine.checkpoints.run_start import choose_start

    rows = []
    for plan in plans:
        grid, device = initialize_distributed(plan)
        engine = initialize_engine(plan, grid, device)
        row = []
        for save in saves:
            resume(engine, choose_start(plan, Path(save)))
            data = batches(plan, grid.dp_rank, engine.iteration * plan.batch.gradient_accumulation_steps)
            row.append([engine.train_batch(data).loss for _ in range(steps)])
        rows.append(row)
    return rows


def worst(losses: Sequence[float], expected: Sequence[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))


Pairs = dict[tuple[str, str], float]
"""(saved, loading) -> largest relative difference of a loss."""


def run(worlds: list[int], steps: int, directory: Path, out: Path | None = None) -> Pairs:
    """All pairs; those that `out` holds already are not run again."""
    layouts = [layout for world in worlds for layout in layouts_of(world)]
    saves = {name(layout): str(directory / str(number)) for number, layout in enumerate(layouts)}
    expected: dict[str, list[float]] = {}
    for world, some in _portions(layouts, worlds):
        plans = [plan_of(layout, steps, saves[name(layout)]) for layout in some]
        expected |= dict(
            zip(map(name, some), run_ranks(world, save_and_go_on, plans, steps, timeout=1200)[0], strict=True)
        )
    found = read_pairs(out, steps)
    done = {target for _, target in found}
    for world, some in _portions([layout for layout in layouts if name(layout) not in done], worlds):
        plans = [plan_of(layout, steps, saves[name(layout)]) for layout in some]
        rows = run_ranks(world, load_each, plans, list(saves.values()), steps, timeout=3600)[0]
        for target, row in zip(map(name, some), rows, strict=True):
            found |= {(source, target): worst(got, expected[source]) for source, got in zip(saves, row, strict=True)}
            print(f"{target}: largest {max(found[source, target] for source in saves):.1e}", flush=True)
        write_pairs(out, steps, found)
    return found


def read_pairs(out: Path | None, steps: int) -> Pairs:
    """Return what an earlier run with as many steps found."""
    if out is None or not out.exists():
        return {}
    kept = json.loads(out.read_text())
    if kept["steps"] != steps:
        raise SystemExit(f"{out} holds losses of {kept['steps']} steps, not {steps}: give another file")
    return {tuple(pair.split(" -> ")): value for pair, value in kept["pairs"].items()}


def write_pairs(out: Path | None, steps: int, found: Pairs) -> None:
    if out is None:
        return
    rows = {" -> ".join(pair): value for pair, value in found.items()}
    head = {"date": time.strftime("%Y-%m-%d"), "steps": steps, "limit": LIMIT, "largest": max(found.values())}
    out.write_text(json.dumps({**head, "pairs": rows}, indent=1) + "\n")


def _portions(layouts: list[dict[str, Any]], worlds: list[int]) -> list[tuple[int, list[dict[str, Any]]]]:
    """Layouts of one number of ranks, a few at a time."""
    by_world = [(world, [layout for layout in layouts if layout["world"] == world]) for world in worlds]
    return [(world, here[i : i + AT_ONCE]) for world, here in by_world for i in range(0, len(here), AT_ONCE)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2, 3, 4], help="numbers of ranks")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, help="JSON of every pair, so far")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        found = run(args.worlds, args.steps, Path(directory), args.out)
    ranks = {name(layout): layout["world"] for world in args.worlds for layout in layouts_of(world)}
    for one, two in itertools.product(args.worlds, repeat=2):
        largest = max(value for (a, b), value in found.items() if (ranks[a], ranks[b]) == (one, two))
        print(f"saved on {one} ranks, loaded on {two}: {largest:.1e}")
    pair, largest = max(found.items(), key=lambda item: item[1])
    print(f"{len(found)} pairs, worst {largest:.1e}: {pair[0]} -> {pair[1]}; limit {LIMIT:.0e}")
    return 0 if largest <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
