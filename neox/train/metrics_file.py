"""`metrics.jsonl`: every number of every step, one JSON object a line, and a picture of the loss made from it."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from neox.engine import SaveReport
from neox.errors import TrainingError
from neox.train.callbacks import Callback, ScalarCallback
from neox.train.state import TrainState

METRICS_FILE = "metrics.jsonl"
PICTURE = "loss.png"


class MetricsFile(ScalarCallback):
    """Appends to `log_dir/metrics.jsonl`; after a resume the later line of an iteration is the one that counts.

    A run that starts at iteration 0 begins a new file; an earlier run's file and picture are kept beside it as
    `metrics-1.jsonl` and `loss-1.png`, and so on. Values are unrounded; one that is not finite is written as the text
    "nan", "inf" or "-inf", so that lines stay JSON.
    """

    def __init__(self, log_dir: str | Path) -> None:
        self.path = Path(log_dir) / METRICS_FILE
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._stream = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 (open as long as the run)
        except OSError as error:
            raise TrainingError(f"log_dir: {self.path} cannot be written: {error.strerror}") from error

    def on_start(self, state: TrainState) -> None:
        if state.iteration > 0:
            _cut_partial_line(self.path)
        elif self.path.stat().st_size > 0:
            self._stream.close()
            _keep_earlier_run(self.path.parent)
            self._stream = open(self.path, "a", encoding="utf-8")  # noqa: SIM115

    def on_end(self, state: TrainState) -> None:
        self._stream.close()

    on_failure = on_end

    def write(self, iteration: int, scalars: Mapping[str, float]) -> None:
        values = {key: value if math.isfinite(value) else str(value) for key, value in scalars.items()}
        self._stream.write(json.dumps({"iteration": iteration, **values}) + "\n")
        self._stream.flush()


def _cut_partial_line(path: Path) -> None:
    """Cut off the part of a line that a killed run wrote last."""
    data = path.read_bytes()
    if data and not data.endswith(b"\n"):
        os.truncate(path, data.rfind(b"\n") + 1)


def _keep_earlier_run(directory: Path) -> None:
    """Rename an earlier run's metrics and picture with the first number that is free."""
    files = [directory / METRICS_FILE, directory / PICTURE]
    for number in itertools.count(1):
        kept = [file.with_stem(f"{file.stem}-{number}") for file in files]
        if not any(file.exists() for file in kept):
            break
    for file, name in zip(files, kept, strict=True):
        if file.exists():
            file.rename(name)


class LossPicture(Callback):
    """Draws `log_dir/loss.png` from the metrics file at checkpoints and at the end."""

    def __init__(self, log_dir: str | Path) -> None:
        self.directory = Path(log_dir)

    def on_save(self, state: TrainState, report: SaveReport) -> None:
        draw_losses(self.directory / METRICS_FILE, self.directory / PICTURE)

    def on_end(self, state: TrainState) -> None:
        draw_losses(self.directory / METRICS_FILE, self.directory / PICTURE)

    on_failure = on_end


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a metrics file; a last line that was cut off is left out."""
    with open(path, encoding="utf-8") as stream:
        for line in stream:
            if line.endswith("\n"):
                yield json.loads(line)


def curves(path: Path) -> dict[str, dict[int, float]]:
    """Return the losses by name and iteration, values that are not finite left out.

    A training step of an iteration that is there already is a resume from an earlier checkpoint: what the file holds
    from that iteration on was trained again, and does not count.
    """
    result: dict[str, dict[int, float]] = {}
    last = 0
    for line in read_metrics(path):
        if "train/lm_loss" in line:
            if line["iteration"] <= last:
                result = {
                    name: {i: loss for i, loss in points.items() if i < line["iteration"]}
                    for name, points in result.items()
                }
            last = line["iteration"]
        for key, value in line.items():
            if key.endswith("/lm_loss") and isinstance(value, float):
                result.setdefault(key, {})[line["iteration"]] = value
    return result


def draw_losses(metrics: Path, picture: Path) -> None:
    """Draw the loss curves of a metrics file as PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # half a second, so not before training starts
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, points in curves(metrics).items():
        iterations = sorted(points)
        marker = "" if name.startswith("train/") else "o"
        axes.plot(iterations, [points[i] for i in iterations], marker=marker, label=name)
    axes.set_xlabel("iteration")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    figure.savefig(picture)
