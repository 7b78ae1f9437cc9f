"""Metrics files: reading, loss curves of one or several runs, and their picture."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

METRICS_FILE = "metrics.jsonl"
PICTURE = "loss.png"


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a metrics file; a last line that was cut off is left out.

    Each row has `iteration`, `kind` (`step`, `validation`, `test`, `tasks` or `save`; files of 0.1 have none) and the
    scalars of that kind: one row of kind `step` for each iteration.
    """
    with open(path, encoding="utf-8") as stream:
        for line in stream:
            if line.endswith("\n"):
                yield json.loads(line)


def curves(path: Path, names: Collection[str] = ()) -> dict[str, dict[int, float]]:
    """Return values of a metrics file by name and iteration, those that are not finite left out.

    A training step of an iteration that is there already is a resume from an earlier checkpoint: what the file holds
    from that iteration on was trained again, and does not count.

    Args:
        path: Metrics file.
        names: Names of scalars; empty means all losses.
    """
    result: dict[str, dict[int, float]] = {}
    last = 0
    for row in read_metrics(path):
        iteration = row["iteration"]
        if "train/lm_loss" in row:
            if iteration <= last:
                result = {key: {i: y for i, y in points.items() if i < iteration} for key, points in result.items()}
            last = iteration
        for key, value in row.items():
            if isinstance(value, float) and (key in names if names else key.endswith("/lm_loss")):
                result.setdefault(key, {})[iteration] = value
    return result


def draw(runs: Mapping[str, Path], picture: Path, names: Collection[str] = ()) -> bool:
    """Draw curves of one or several runs as PNG: a colour for each run, training as lines, evaluations with points.

    Args:
        runs: Metrics files by label; the label of a single run is not shown.
        picture: File to write.
        names: As for `curves`.

    Returns:
        Whether there was something to draw.
    """
    found = {label: curves(path, names) for label, path in runs.items()}
    if not any(found.values()):
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # a second of imports
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for number, (run, lines) in enumerate(found.items()):
        for name, points in lines.items():
            iterations = sorted(points)
            evaluation = not name.startswith(("train/", "runtime/", "timers/"))
            axes.plot(
                iterations,
                [points[i] for i in iterations],
                marker="o" if evaluation else "",
                linestyle="--" if evaluation and len(found) > 1 else "-",
                color=f"C{number % 10}" if len(found) > 1 else None,
                label=f"{run}: {name}" if len(found) > 1 else name,
            )
    axes.set_xlabel("iteration")
    axes.set_ylabel(" ".join(names) if names else "loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture, format="png")
    return True
