"""Time that training waits for a checkpoint, with saves that block it and with `async_save`.

    benchmarks/save_stall.py [--ranks 2] [--saves 3] [--dir DIRECTORY]

A model of 98 million parameters in fp32 with AdamW, ZeRO 1 over the data ranks: 1.6 GB a checkpoint. Both kinds of save
take turns in one run, and a step of training follows each. Prints the stall, the time until the commit, and the size.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

from tests.distributed.spawn import run_ranks
from tests.distributed.training_runs import batches, tiny_plan

MODEL = {"num_layers": 8, "hidden_size": 1008, "num_attention_heads": 12, "train_batch_size": 4}


def measure(ranks: int, saves: int, directory: Path) -> list[tuple[str, float, float]]:
    """(kind, stall, seconds until the commit) of each save; on every rank."""
    from neox.engine import BackgroundSaves, initialize_distributed, initialize_engine, save_checkpoint

    plan = tiny_plan(ranks, zero=1, save=str(directory), keep_last_n_checkpoints=1, **MODEL)
    grid, device = initialize_distributed(plan)
    engine = initialize_engine(plan, grid, device)
    background, data, rows = BackgroundSaves(engine), batches(plan, grid.dp_rank), []
    for _ in range(saves):
        engine.train_batch(data)
        started = time.perf_counter()
        save_checkpoint(engine, directory)
        rows.append(("waiting", *[time.perf_counter() - started] * 2))
        engine.train_batch(data)
        background.start(directory)
        engine.train_batch(data)
        background.wait()
        rows += [("async_save", report.stall, report.seconds) for report in background.take_reports()]
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--dir", type=Path, help="where checkpoints go; a temporary directory otherwise")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as directory:
        rows = run_ranks(args.ranks, measure, args.ranks, args.saves, Path(directory), timeout=900)[0]
        (last,) = (path for path in Path(directory).iterdir() if path.is_dir())
        size = sum(file.stat().st_size for file in last.rglob("*") if file.is_file())
    print(f"{size / 1e6:,.0f} MB a checkpoint, {args.ranks} ranks, median of {args.saves} saves each")
    for kind in ("waiting", "async_save"):
        stall, seconds = (statistics.median(row[i] for row in rows if row[0] == kind) for i in (1, 2))
        print(f"{kind:<11} training waited {stall:6.2f} s, committed after {seconds:6.2f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
