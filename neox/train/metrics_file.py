"""`metrics.jsonl`: every number of every step, one JSON object a line, and a picture of the loss made from it."""

from __future__ import annotations

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

    Values are unrounded; one that is not finite is written as the text "nan", "inf" or "-inf", so that lines stay JSON.
    """

    def __init__(self, log_dir: str | Path) -> None:
        self.path = Path(log_dir) / METRICS_FILE
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _end_last_line(self.path)
            self._stream = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 (open as long as the run)
        except OSError as error:
            raise TrainingError(f"log_dir: {self.path} cannot be written: {error.strerror}") from error

    def on_end(self, state: TrainState) -> None:
        self._stream.close()

    on_failure = on_end

    def write(self, iteration: int, scalars: Mapping[str, float]) -> None:
        values = {key: value if math.isfinite(value) else str(value) for key, value in scalars.items()}
        self._stream.write(json.dumps({"iteration": iteration, **values}) + "\n")
        self._stream.flush()


def _end_last_line(path: Path) -> None:
    """Cut off what a killed run left of an unfinished line."""
    if path.exists():
        data = path.read_bytes()
        if data and not data.endswith(b"\n"):
            os.truncate(path, data.rfind(b"\n") + 1)


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
    """Return the losses by name and iteration, later lines winning, values that are not finite left out."""
    result: dict[str, dict[int, float]] = {}
    for line in read_metrics(path):
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
