"""The metrics file of a run, with a picture of the loss (`log_dir`)."""

from __future__ import annotations

import itertools
import json
import math
import threading
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from neox.engine import SaveReport, StepReport, TrainState
from neox.errors import TrainingError
from neox.features.trackers.tracker import Tracker, cut_partial_line
from neox.log import get_logger
from neox.metrics import METRICS_FILE, PICTURE, STABILITY, STABILITY_PICTURE, draw, draw_stability
from neox.plan import RunPlan

_log = get_logger(__name__)


def build(plan: RunPlan, rank: int) -> MetricsFile | None:
    """Return the tracker of rank 0; None without `log_dir`."""
    directory = plan.config.logging.log_dir
    if rank != 0 or not directory:
        return None
    return MetricsFile(directory)


class MetricsFile(Tracker):
    """Metrics as `log_dir/metrics.jsonl`, one JSON object a line, and the trained loss as `log_dir/loss.png`.

    A row's `kind` says what was measured (see `neox.metrics.read_metrics`); each iteration has one row of kind `step`.

    The picture is drawn at checkpoints and at the end, and with `log_stability_every` also `log_dir/stability.png`. A
    run that starts at iteration 0 begins new files. Those of an earlier run are kept next to them as `metrics-1.jsonl`
    and `loss-1.png`, and so on. Values are unrounded. One that is not finite is written as the text "nan", "inf" or
    "-inf", so that lines stay JSON, and one for which nothing was counted as null.

    Args:
        log_dir: Directory of the files, which is created if it does not exist.

    Raises:
        TrainingError: If the file cannot be written.
    """

    def __init__(self, log_dir: str | Path) -> None:
        self.path = Path(log_dir) / METRICS_FILE
        self.picture = Path(log_dir) / PICTURE
        self.stability_picture = Path(log_dir) / STABILITY_PICTURE
        self._preloading = False
        self._observes_stability = False
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._stream = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 (open as long as the run)
        except OSError as error:
            raise TrainingError(f"log_dir: {self.path} cannot be written: {error.strerror}") from error

    def on_start(self, state: TrainState) -> None:
        """Continue the file of the training that is resumed, or begin a new one."""
        if state.iteration > 0:
            cut_partial_line(self.path)
        elif self.path.stat().st_size > 0:
            self._stream.close()
            _keep_earlier_run(self.path, self.picture, self.stability_picture)
            self._stream = open(self.path, "a", encoding="utf-8")  # noqa: SIM115

    def on_step(self, state: TrainState, report: StepReport) -> None:
        """Write the step's scalars."""
        super().on_step(state, report)
        self._observes_stability |= any(name.startswith(f"{STABILITY}/") for name in report.result.numbers)
        if not self._preloading:  # a second of imports: neither before the first step nor after the last one
            self._preloading = True
            threading.Thread(target=import_module, args=("matplotlib.figure",), daemon=True).start()

    def on_save(self, state: TrainState, report: SaveReport) -> None:
        """Write the save's durations, and draw."""
        super().on_save(state, report)
        self._draw()

    def end(self, *, failed: bool) -> None:
        """Close the file, and draw."""
        self._stream.close()
        self._draw()

    def _draw(self) -> None:
        """Draw the pictures. A full disk or a damaged file of the user's ends no training."""
        try:
            draw({"": self.path}, self.picture)
            if self._observes_stability:
                draw_stability(self.path, self.stability_picture)
        except Exception as error:  # matplotlib may raise anything
            _log.warning("%s cannot be drawn (%s: %s)", self.picture, type(error).__name__, error)

    def write(self, iteration: int, kind: str, scalars: Mapping[str, float | None]) -> None:
        """Append one line."""
        row: dict[str, Any] = {"iteration": iteration, "kind": kind}
        for name, value in scalars.items():
            row[name] = value if value is None or math.isfinite(value) else str(value)
        self._stream.write(json.dumps(row) + "\n")
        self._stream.flush()


def _keep_earlier_run(*files: Path) -> None:
    """Rename files, those that exist, with the first number that is free."""
    for number in itertools.count(1):
        kept = [file.with_stem(f"{file.stem}-{number}") for file in files]
        if not any(file.exists() for file in kept):
            break
    for file, name in zip(files, kept, strict=True):
        if file.exists():
            file.rename(name)
