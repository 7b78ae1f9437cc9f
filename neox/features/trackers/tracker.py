"""Base class of trackers, which write the scalars of steps, evaluations and saves, and what they share.

Trackers are off unless they are configured; configured and not installed, they are an error.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from neox.engine import Feature, SaveReport, StepReport, TrainState
from neox.log import get_logger
from neox.plan import RunPlan, plan_as_dict

_log = get_logger(__name__)
_SHOWN = (
    "grid",
    "batch",
    "precision",
    "vocab_size",
    "padded_vocab_size",
    "parameters",
    "memory",
    "figures",
    "notes",
    "deepspeed",
)
"""Parts of the plan that trackers show."""


class Tracker(Feature):
    """Feature of rank 0 that writes the scalars of steps, evaluations and checkpoints; subclasses implement `write`.

    A row that cannot be written is lost, with one warning; neither this nor a failed `end` ever ends the training.
    """

    _lost_rows = 0

    def write(self, iteration: int, kind: str, scalars: Mapping[str, float | None]) -> None:
        """Write scalars by name, at an iteration; `kind` is `step`, `save` or the name of an evaluation.

        A scalar is None if nothing was counted for it, such as the loss of a step without labels.
        """
        raise NotImplementedError

    def end(self, *, failed: bool) -> None:
        """Close what `on_start` has opened; after a failure perhaps before it has opened anything."""

    def on_end(self, state: TrainState) -> None:
        """End the tracker."""
        self._end_or_warn(failed=False)

    def on_failure(self, state: TrainState) -> None:
        """End the tracker; its run counts as failed."""
        self._end_or_warn(failed=True)

    def on_step(self, state: TrainState, report: StepReport) -> None:
        """Write the step's scalars."""
        self._write_or_lose(state.iteration, "step", report.scalars())

    def on_evaluation(self, state: TrainState, name: str, scalars: Mapping[str, float | None]) -> None:
        """Write the evaluation's scalars."""
        self._write_or_lose(state.iteration, name, scalars)

    def on_save(self, state: TrainState, report: SaveReport) -> None:
        """Write the save's durations."""
        self._write_or_lose(state.iteration, "save", report.scalars())

    def _end_or_warn(self, *, failed: bool) -> None:
        try:
            self.end(failed=failed)
        except Exception as error:  # the tracker's package may raise anything
            _log.warning("%s cannot end its run (%s: %s)", type(self).__name__, type(error).__name__, error)

    def _write_or_lose(self, iteration: int, kind: str, scalars: Mapping[str, float | None]) -> None:
        name = type(self).__name__
        try:
            self.write(iteration, kind, scalars)
        except Exception as error:  # the tracker's package may raise anything
            if not self._lost_rows:
                _log.warning("%s cannot write (%s: %s); training continues", name, type(error).__name__, error)
            self._lost_rows += 1
            return
        if self._lost_rows:
            _log.warning("%s can write again; %d rows were lost", name, self._lost_rows)
            self._lost_rows = 0


def counted(scalars: Mapping[str, float | None]) -> dict[str, float]:
    """Return the scalars that have a number."""
    return {name: value for name, value in scalars.items() if value is not None}


def run_settings(plan: RunPlan) -> dict[str, Any]:
    """Return what trackers show of a run: its configuration as flat keys, and its plan under `plan`."""
    report = plan_as_dict(plan)
    derived = {"architecture": plan.architecture.to_dict()}
    for name in _SHOWN:
        derived[name] = report[name]
    return {**plan.config.to_flat(), "plan": derived}


def tracker_directory(plan: RunPlan) -> Path:
    """Return the directory in which trackers keep files for a resumed training."""
    return Path(plan.config.logging.log_dir or plan.config.checkpoint.save or os.curdir)


def kept_run_id(file: Path, *, resumed: bool) -> str:
    """Return the id that `file` holds if the training is resumed; else write a new one to it and return that."""
    if resumed and file.is_file():
        kept = file.read_text().strip()
        if kept:
            return kept
    run_id = secrets.token_hex(4)
    file.write_text(run_id + "\n")
    return run_id


def cut_partial_line(path: Path) -> None:
    """Cut off the part of a line that a killed run wrote last."""
    data = path.read_bytes()
    if data and not data.endswith(b"\n"):
        os.truncate(path, data.rfind(b"\n") + 1)
