"""TensorBoard and Weights & Biases: off unless asked for, an error when asked for and not installed."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from neox.config import RunPlan
from neox.errors import ConfigError, TrainingError, install_command
from neox.train.callbacks import ScalarCallback
from neox.train.state import TrainState

WANDB_RUN_ID_FILE = "wandb_run_id"
"""In the run directory: which run of wandb a resumed training goes on with."""


class TensorBoard(ScalarCallback):
    """Writes scalars for TensorBoard into `tensorboard_dir`."""

    def __init__(self, directory: str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                f"tensorboard_dir is set, but tensorboard is not installed ({error}): "
                f"{install_command('requirements-tensorboard.txt')}, or unset tensorboard_dir"
            ) from error
        self.directory = directory
        self._make_writer = SummaryWriter
        self._writer: Any = None

    def on_start(self, state: TrainState) -> None:
        # TensorBoard drops older points from this step on: those that a resume trains again, or all of another run.
        purge = state.iteration + 1 if state.iteration else 0
        try:
            self._writer = self._make_writer(self.directory, purge_step=purge)
        except OSError as error:
            raise TrainingError(f"tensorboard_dir: {self.directory} cannot be written: {error.strerror}") from error

    def on_end(self, state: TrainState) -> None:
        self._writer.close()

    def on_failure(self, state: TrainState) -> None:
        if self._writer is not None:
            self._writer.close()

    def write(self, iteration: int, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, iteration)


class WandB(ScalarCallback):
    """Reports to Weights & Biases (`WANDB_MODE=offline` keeps the run on disk).

    The run's id is kept in `log_dir` (else `save`), so that a resumed training goes on with the same run. Charts count
    in `iteration`: wandb's own step never goes back, which a resume from an earlier checkpoint does.
    """

    def __init__(self, plan: RunPlan) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                f"use_wandb is true, but wandb is not installed ({error}): "
                f"{install_command('requirements-wandb.txt')}, or set use_wandb to false"
            ) from error
        self._wandb: Any = wandb
        self._plan = plan
        self._run: Any = None

    def on_start(self, state: TrainState) -> None:
        keys, wandb = self._plan.config.logging, self._wandb
        directory = Path(keys.log_dir or self._plan.config.checkpoint.save or os.curdir)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            run_id = _run_id(directory / WANDB_RUN_ID_FILE, resumed=state.iteration > 0)
        except OSError as error:
            raise TrainingError(f"{directory}: the id of wandb's run cannot be kept: {error.strerror}") from error
        try:
            self._run = wandb.init(
                project=keys.wandb_project,
                group=keys.wandb_group,
                name=keys.wandb_run_name,
                entity=keys.wandb_team,
                config=self._plan.config.to_flat(),
                dir=directory,
                id=run_id,
                resume="allow",
                settings=wandb.Settings(base_url=keys.wandb_host),
            )
        except wandb.errors.Error as error:
            raise TrainingError(
                f"wandb could not start ({error}); log in, set WANDB_MODE=offline, or unset use_wandb"
            ) from error
        self._run.define_metric("iteration")
        self._run.define_metric("*", step_metric="iteration")

    def write(self, iteration: int, scalars: Mapping[str, float]) -> None:
        self._run.log({"iteration": iteration, **scalars})

    def on_end(self, state: TrainState) -> None:
        self._run.finish()

    def on_failure(self, state: TrainState) -> None:
        if self._run is not None:
            self._run.finish(exit_code=1)


def _run_id(file: Path, *, resumed: bool) -> str:
    """Return the id that `file` holds if the training is resumed; else a new one, which it holds afterwards."""
    if resumed and file.is_file() and (kept := file.read_text().strip()):
        return kept
    run_id = secrets.token_hex(4)
    file.write_text(run_id + "\n")
    return run_id
