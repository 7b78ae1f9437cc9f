"""Compare loss curves of every layout of up to four ranks with one rank's: python benchmarks/layouts.py

The same initial weights and data, fp32, clipping on, 20 steps; (pp, mp, dp) x ZeRO stage with a product of at most 4,
tied and untied. Writes benchmarks/results/layouts-DATE.json: for each layout the largest relative difference of losses
and of gradient norms.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
from pathlib import Path
from typing import Any

import deepspeed
import torch

from tests.distributed.spawn import run_ranks
from tests.distributed.training_runs import FULL_MATRIX, legal_layouts, tiny_plan, train_curves

ROOT = Path(__file__).resolve().parent.parent
Curve = list[tuple[float, float]]


def compare(curve: Curve, reference: Curve) -> dict[str, float]:
    """Largest relative differences of losses and gradient norms."""
    losses = (abs(a - b) / abs(b) for (a, _), (b, _) in zip(curve, reference, strict=True))
    norms = (abs(a - b) / abs(b) for (_, a), (_, b) in zip(curve, reference, strict=True))
    return {"loss": max(losses), "grad_norm": max(norms)}


def measure(worlds: list[int], steps: int) -> list[dict[str, Any]]:
    """Train every layout; one row each."""
    rows = []
    for tied in (True, False):
        keys = {**FULL_MATRIX, "no_weight_tying": not tied}
        reference = run_ranks(1, train_curves, [tiny_plan(1, **keys)], steps)[0][0]
        for world in worlds:
            layouts = legal_layouts(world)
            plans = [tiny_plan(world, **layout, **keys) for layout in layouts]
            curves = run_ranks(world, train_curves, plans, steps, timeout=3600)[0]
            for layout, plan, curve in zip(layouts, plans, curves, strict=True):
                row = {**layout, "dp": plan.grid.dp_size, "tied": tied, **compare(curve, reference)}
                print(row, flush=True)
                rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    rows = measure(arguments.worlds, arguments.steps)
    today = datetime.date.today().isoformat()
    result = {
        "date": today,
        "machine": platform.machine(),
        "torch": torch.__version__,
        "deepspeed": deepspeed.__version__,
        "steps": arguments.steps,
        "largest_loss_difference": max(row["loss"] for row in rows),
        "layouts": rows,
    }
    path = ROOT / "benchmarks" / "results" / f"layouts-{today}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{len(rows)} layouts, largest relative difference of a loss {result['largest_loss_difference']:.2e}: {path}")


if __name__ == "__main__":
    main()
