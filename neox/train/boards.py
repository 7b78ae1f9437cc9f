"""TensorBoard and Weights & Biases: off unless asked for, an error when asked for and not installed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from neox.config import RunPlan
from neox.errors import ConfigError, TrainingError
from neox.train.callbacks import Callback, StepReport
from neox.train.state import TrainState


class TensorBoard(Callback):
    """Writes scalars for TensorBoard into `tensorboard_dir`."""

    def __init__(self, directory: str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                f"tensorboard_dir is set, but tensorboard is not installed ({error}): "
                "pip install -r requirements/requirements-tensorboard.txt, or unset tensorboard_dir"
            ) from error
        self._writer = SummaryWriter(directory)

    def on_step(self, state: TrainState, report: StepReport) -> None:
        self._write(state, report.scalars())

    def on_evaluation(self, state: TrainState, name: str, scalars: Mapping[str, float]) -> None:
        self._write(state, scalars)

    def on_end(self, state: TrainState) -> None:
        self._writer.close()

    def _write(self, state: TrainState, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, state.iteration)


class WandB(Callback):
    """Reports to Weights & Biases (`WANDB_MODE=offline` keeps the run on disk)."""

    def __init__(self, plan: RunPlan) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                f"use_wandb is true, but wandb is not installed ({error}): "
                "pip install -r requirements/requirements-wandb.txt, or set use_wandb to false"
            ) from error
        keys = plan.config.logging
        try:
            self._run: Any = wandb.init(
                project=keys.wandb_project,
                group=keys.wandb_group,
                name=keys.wandb_run_name,
                entity=keys.wandb_team,
                config=plan.config.to_flat(),
                dir=keys.log_dir or os.curdir,
                settings=wandb.Settings(base_url=keys.wandb_host),
            )
        except wandb.errors.Error as error:
            raise TrainingError(
                f"wandb could not start ({error}); log in, set WANDB_MODE=offline, or unset use_wandb"
            ) from error

    def on_step(self, state: TrainState, report: StepReport) -> None:
        self._run.log(report.scalars(), step=state.iteration)

    def on_evaluation(self, state: TrainState, name: str, scalars: Mapping[str, float]) -> None:
        self._run.log(dict(scalars), step=state.iteration)

    def on_end(self, state: TrainState) -> None:
        self._run.finish()
