"""Scores of a checkpoint, added to the trackers of the run that wrote it."""

from __future__ import annotations

from collections.abc import Mapping

from neox.engine import TrainState
from neox.features.trackers.comet import Comet
from neox.features.trackers.mlflow import MLflow
from neox.features.trackers.tensorboard import TensorBoard
from neox.features.trackers.tracker import Tracker
from neox.features.trackers.trackio import Trackio
from neox.features.trackers.wandb import WandB
from neox.plan import RunPlan


def report_scores(plan: RunPlan, scores: Mapping[str, float], iteration: int) -> None:
    """Add the scores of a checkpoint to the trackers of the run that wrote it, if they are configured.

    Args:
        plan: Plan whose configuration names the trackers.
        scores: Scores by name.
        iteration: Iteration of the checkpoint.
    """
    keys = plan.config.logging
    state = TrainState(iteration=iteration)
    trackers: list[Tracker] = []
    if keys.tensorboard_dir:
        trackers.append(TensorBoard(keys.tensorboard_dir, purge=False))  # the curves beyond the checkpoint stay
    if keys.use_wandb:
        trackers.append(WandB(plan))
    if keys.use_mlflow:
        trackers.append(MLflow(plan, "evaluation"))
    if keys.use_comet:
        trackers.append(Comet(plan, "evaluation"))
    if keys.use_trackio:
        trackers.append(Trackio(plan, "evaluation"))
    for tracker in trackers:
        tracker.on_start(state)
        tracker.on_evaluation(state, "tasks", scores)
        tracker.on_end(state)
