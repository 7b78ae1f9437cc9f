"""TensorBoard (`tensorboard_dir`)."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from typing import Any

from neox.engine import TrainState
from neox.errors import ConfigError, TrainingError, install_command
from neox.features.trackers.tracker import Tracker, counted, run_settings
from neox.objectives import build_objective, evaluated_objective
from neox.plan import RunPlan


def build(plan: RunPlan, rank: int) -> TensorBoard | None:
    """Return the tracker of rank 0; None if it is not configured."""
    directory = plan.config.logging.tensorboard_dir
    if rank != 0 or not directory:
        return None
    return TensorBoard(directory, plan)


class TensorBoard(Tracker):
    """TensorBoard event files in a directory.

    Args:
        directory: Directory of the files (`tensorboard_dir`).
        plan: Plan that is shown as text and as hyperparameters; None for scores of a checkpoint.
        purge: Whether `on_start` makes TensorBoard drop earlier points: those that a resume trains again, or, from
            iteration 0, all of an earlier run.

    Raises:
        ConfigError: If tensorboard is not installed.
    """

    def __init__(self, directory: str, plan: RunPlan | None = None, *, purge: bool = True) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                f"tensorboard_dir is set, but tensorboard is not installed ({error}): "
                f"{install_command('requirements-tensorboard.txt')}, or unset tensorboard_dir"
            ) from error
        self.directory = directory
        self.plan = plan
        self.purge = purge
        self._make_writer: Any = SummaryWriter
        self._writer: Any = None

    def on_start(self, state: TrainState) -> None:
        """Open an event file.

        Raises:
            TrainingError: If the directory cannot be written.
        """
        purge_step = None
        if self.purge:
            purge_step = state.iteration + 1 if state.iteration else 0
        try:
            self._writer = self._make_writer(self.directory, purge_step=purge_step)
        except OSError as error:
            raise TrainingError(f"tensorboard_dir: {self.directory} cannot be written: {error.strerror}") from error
        if self.plan is not None:
            self._describe(self.plan, state.iteration)

    def _describe(self, plan: RunPlan, iteration: int) -> None:
        """Add the run's settings as text, and those that are numbers, words or truth values as hyperparameters."""
        from torch.utils.tensorboard.summary import hparams

        settings = run_settings(plan)
        derived = settings.pop("plan")
        for name, values in (("config", settings), ("plan", derived)):
            text = json.dumps(values, indent=2, default=str)
            self._writer.add_text(name, textwrap.indent(text, "    ") + "\n", iteration)
        flat = {name: value for name, value in settings.items() if isinstance(value, bool | int | float | str)}
        objective = build_objective(plan)
        names = (f"train/{objective.names[0]}", f"validation/{evaluated_objective(objective).names[0]}")
        for summary in hparams(flat, dict.fromkeys(names, 0.0)):
            self._writer.file_writer.add_summary(summary)

    def end(self, *, failed: bool) -> None:
        """Close the event file if there is one."""
        if self._writer is not None:
            self._writer.close()

    def write(self, iteration: int, kind: str, scalars: Mapping[str, float | None]) -> None:
        """Add one point to each curve."""
        for name, value in counted(scalars).items():
            self._writer.add_scalar(name, value, iteration)
