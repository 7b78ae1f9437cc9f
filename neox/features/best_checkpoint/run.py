"""The name `best` for the checkpoint with the best value of a metric (`save_best`), given by rank 0.

Evaluation and save of one step come in either order: before the last step the evaluation is first, after it the save.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from neox.checkpoint.save_directory.best import (
    BestCheckpoint,
    change_of_rule,
    forget_best,
    name_best,
    read_best,
)
from neox.checkpoint.save_directory.staging import kept_from_deletion
from neox.checkpoint_files.names import step_directory
from neox.engine import Engine, Feature, SaveReport, TrainState
from neox.errors import CheckpointError, ConfigError
from neox.evaluation.best_rule import best_rule
from neox.evaluation.evaluation_scalars import BITS_PER_BYTE, bytes_unknown, set_of_scalar
from neox.log import get_logger
from neox.plan import RunPlan

_log = get_logger(__name__)


def build(plan: RunPlan, rank: int) -> NameBest | None:
    """Return the feature, on rank 0; None without `save_best`."""
    if rank != 0 or plan.config.checkpoint.save_best is None:
        return None
    return NameBest(plan)


class NameBest(Feature):
    """Compares the checkpoints of steps that were evaluated, and keeps the best one from deletion.

    It is kept until the process ends; a later start keeps it again.
    """

    def __init__(self, plan: RunPlan) -> None:
        keys = plan.config.checkpoint
        self._rule = best_rule(plan)
        self._metric = self._rule.metric
        self._save = Path(keys.save or ".")
        self._best: BestCheckpoint | None = None
        self._is_comparable = True  # whether the best one was compared by the same rule
        self._kept = ExitStack()
        self._values: dict[int, float | None] = {}  # by iteration, of evaluations whose checkpoint is not saved yet
        self._saved: dict[int, Path] = {}  # the last checkpoint by its iteration

    def on_data(self, engine: Engine, data: Any) -> None:
        """Check that bits per byte can be computed. The launcher may not have seen the data.

        Raises:
            ConfigError: The bytes of a set that they need are not known.
        """
        if not self._metric.endswith(BITS_PER_BYTE) or self._metric.startswith("eval/"):
            return
        one_set = set_of_scalar(self._metric, {item.name or "" for item in data.valid})
        unknown = []
        for item in data.valid:
            if item.bytes_per_token is None and one_set in (None, item.name):
                unknown.append("the validation data" if item.name is None else f"the validation set {item.name}")
        if unknown:
            raise ConfigError(bytes_unknown(self._metric, unknown))

    def on_start(self, state: TrainState) -> None:
        """Go on with the best checkpoint so far, or forget that of an earlier run.

        One that was the best by another metric, goal or data keeps its name until another one is evaluated.
        """
        if state.iteration == 0:
            forget_best(self._save)
            return
        path = self._save / step_directory(state.iteration)
        if path.is_dir():  # its evaluation may still come, if nothing is left to train
            self._saved = {state.iteration: path}
        found = read_best(self._save)
        if found is None:
            return
        change = change_of_rule(found, self._rule)
        if change is not None:
            _log.warning("%s", change)
            self._is_comparable = False
        self._keep(found)

    def on_evaluation(self, state: TrainState, name: str, scalars: Mapping[str, float | None]) -> None:
        """Take the value of the metric.

        Raises:
            ConfigError: The evaluation that has the metric's group reports no such scalar.
        """
        group = self._metric.partition("/")[0]
        if self._metric in scalars:
            # Later ones were evaluated before a rollback; earlier ones may still be saved in the background.
            self._values = {done: value for done, value in self._values.items() if done < state.iteration}
            self._values[state.iteration] = scalars[self._metric]
            self._compare(state.iteration)
        elif name == {"eval": "tasks"}.get(group, group):
            known = ", ".join(scalar for scalar in scalars if scalar.startswith(f"{group}/"))
            raise ConfigError(f"save_best: {self._metric} is no scalar of this run; it has {known}")

    def on_save(self, state: TrainState, report: SaveReport) -> None:
        """Take a committed checkpoint."""
        self._saved = {report.iteration: report.path}
        self._values = {done: value for done, value in self._values.items() if done >= report.iteration}
        if self._best is not None and self._best.iteration == report.iteration:
            self._keep(self._best)  # written again after a rollback to it
        self._compare(report.iteration)

    def _compare(self, iteration: int) -> None:
        """Name the checkpoint of an iteration, if it is there, was evaluated, and is better than the best so far."""
        value = self._values.get(iteration)
        path = self._saved.get(iteration)
        if value is None or path is None or not math.isfinite(value):
            return
        if self._best is not None and self._is_comparable:
            is_better = value < self._best.value if self._rule.goal == "min" else value > self._best.value
            if not is_better:
                return
        best = BestCheckpoint(path.name, iteration, value, self._rule)
        try:
            name_best(self._save, best)
        except CheckpointError as error:
            _log.warning("%s; training goes on", error)
            return
        self._keep(best)
        self._is_comparable = True
        _log.info("best: %s with %s %.6g", path.name, self._metric, value)

    def _keep(self, best: BestCheckpoint) -> None:
        """Protect a checkpoint from deletion instead of the one before."""
        self._kept.close()
        self._best = best
        with suppress(OSError):  # a checkpoint of gpt-neox has no manifest, and is not pruned
            self._kept.enter_context(kept_from_deletion(self._save / best.checkpoint))
