"""Predicted beside measured peak memory, from the training benchmark's runs on GPUs.

    benchmarks/memory_table.py [DIRECTORY ...]     default: everything under benchmarks/results

Prints a Markdown table of each run of our engine that recorded its peak (`train.py --sides neox --json` on a GPU, as
`gpu.sh` does it). Measured is `torch.cuda.max_memory_allocated()`: what the caching allocator and the CUDA context hold
beside it is not in there. Exits with 1 if there is no such run.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
HEADER = ("date", "GPU", "model", "micro batch x length", "attention", "recompute", "predicted", "measured", "ratio")
GIB = 2**30


def runs(directories: Iterable[Path]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield (what the file says of all its rows, row) of each run that knows both figures."""
    for directory in directories:
        for path in sorted(directory.rglob("train-*.json")):
            yield from _measured(json.loads(path.read_text()))
        for path in sorted(directory.rglob("gpu-*.json")):
            for step in json.loads(path.read_text())["steps"].values():
                if isinstance(step["figures"], dict):
                    yield from _measured(step["figures"])


def _measured(about: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    rows = about.get("rows", ())
    if len(rows) > 1:  # a peak is that of all sides together
        return
    for row in rows:
        if row.get("peak_memory_bytes") and row.get("predicted_memory_bytes"):
            yield about, row


def cells(about: dict[str, Any], row: dict[str, Any]) -> tuple[str, ...]:
    """Return the table's row; memory in GiB, and how much of the measured peak was predicted."""
    shape, predicted, measured = row["shape"], row["predicted_memory_bytes"], row["peak_memory_bytes"]
    attention = row["attention"] + (", compiled" if row["compile"] else "")
    return (
        about["date"],
        about["device"],
        f"{about['name']} {row['side'].removeprefix('neox ')}",
        f"{shape['micro_batch']} x {shape['seq']}",
        attention,
        "yes" if row["recompute"] else "no",
        f"{predicted / GIB:.1f} GiB",
        f"{measured / GIB:.1f} GiB",
        f"{predicted / measured:.2f}",
    )


def main() -> int:
    """Print the table; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directories", nargs="*", type=Path, default=[RESULTS], metavar="DIRECTORY")
    rows = [cells(*run) for run in runs(parser.parse_args().directories)]
    if not rows:
        print("skipped: no run on a GPU is recorded here: benchmarks/gpu.sh makes them", file=sys.stderr)
        return 1
    for row in (HEADER, ["---"] * len(HEADER), *rows):
        print("| " + " | ".join(row) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
