"""Every layout loads what every other one saved: how far the losses are from the undisturbed run's.

    benchmarks/resume_pairs.py [--worlds 1 2 3 4] [--steps 20] [--out FILE.json]

A layout is (pp, mp, dp, ZeRO stage); all legal ones of each number of ranks are trained for three steps, saved, and go
on for `--steps`; then each loads each of those checkpoints and does the same steps. fp32, tied embeddings, clipping on.
Prints the largest relative difference of a loss by numbers of ranks, and the worst pair.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.distributed.spawn import run_ranks
from tests.distributed.test_any_degrees import pairs, plan_of, worst
from tests.distributed.training_runs import TINY, legal_layouts

LIMIT = 1e-6  # relative, over the steps


def layouts_of(world: int) -> list[dict[str, Any]]:
    """Legal layouts of that many ranks; tensor ranks must divide the model's heads."""
    legal = [layout for layout in legal_layouts(world) if TINY["num_attention_heads"] % layout["mp"] == 0]
    return [{**layout, "world": world} for layout in legal]


def name(layout: dict[str, Any]) -> str:
    dp = layout["world"] // (layout["pp"] * layout["mp"])
    return f"pp{layout['pp']} mp{layout['mp']} dp{dp} zero{layout['zero']}"


def run(worlds: list[int], steps: int, directory: Path) -> dict[tuple[str, str], float]:
    """(saved, loading) -> largest relative difference of a loss."""
    layouts = [layout for world in worlds for layout in layouts_of(world)]
    keys = {"train_iters": 3 + steps + 10, "lr_decay_iters": 100, "train_batch_size": 12}
    saves = {name(layout): str(directory / str(number)) for number, layout in enumerate(layouts)}
    expected: dict[str, list[float]] = {}
    for world in worlds:
        here = [layout for layout in layouts if layout["world"] == world]
        plans = [plan_of(world, layout, save=saves[name(layout)], **keys) for layout in here]
        rows = run_ranks(world, pairs, plans, [], steps, timeout=1200)[0]
        expected |= dict(zip(map(name, here), rows, strict=True))
    found = {}
    for target in layouts:
        world = target["world"]
        plans = [plan_of(world, target, load=save, **keys) for save in saves.values()]
        rows = run_ranks(world, pairs, [], plans, steps, timeout=1200)[0]
        for source, row in zip(saves, rows, strict=True):
            found[source, name(target)] = worst(row, expected[source])
        print(f"{name(target)}: largest {max(found[source, name(target)] for source in saves):.1e}", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2, 3, 4], help="numbers of ranks")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, help="write every pair as JSON")
    args = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        found = run(args.worlds, args.steps, Path(directory))
    ranks = {name(layout): layout["world"] for world in args.worlds for layout in layouts_of(world)}
    for one, two in itertools.product(args.worlds, repeat=2):
        largest = max(value for (a, b), value in found.items() if (ranks[a], ranks[b]) == (one, two))
        print(f"saved on {one} ranks, loaded on {two}: {largest:.1e}")
    pair, largest = max(found.items(), key=lambda item: item[1])
    print(f"{len(found)} pairs, worst {largest:.1e}: {pair[0]} -> {pair[1]}; limit {LIMIT:.0e}")
    if args.out:
        head = {"date": time.strftime("%Y-%m-%d"), "steps": args.steps, "seconds": round(time.monotonic() - started)}
        rows = {f"{a} -> {b}": value for (a, b), value in found.items()}
        args.out.write_text(json.dumps({**head, "limit": LIMIT, "largest": largest, "pairs": rows}, indent=1) + "\n")
    return 0 if largest <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
