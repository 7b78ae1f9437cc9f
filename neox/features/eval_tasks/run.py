"""Evaluation tasks that are scored whenever validation is due (`eval_tasks`)."""

from __future__ import annotations

from collections.abc import Mapping

from neox.checkpoint import add_end_ids
from neox.engine import Engine, Feature, RunStart, TrainedModel, from_first_rank
from neox.errors import ConfigError
from neox.evaluation.evaluate import check_tasks, evaluate_in_training
from neox.evaluation.tasks import TaskScalars, is_scalar_of, unknown_scalar
from neox.log import get_logger
from neox.tokenizer import tokenizer_of

_log = get_logger(__name__)


def build(model: TrainedModel, start: RunStart) -> EvalTasks | None:
    """Return the tasks; None if there are none.

    Raises:
        EvaluationError: A task does not exist.
        ConfigError: None has the score that `save_best` names. A run that ends so is not started again.
    """
    if not model.plan.config.generation.eval_tasks:
        return None
    return EvalTasks(model)


class EvalTasks(Feature):
    """Scores of the tasks by the model in training."""

    def __init__(self, model: TrainedModel) -> None:
        self._plan = model.plan
        self._tokenizer = tokenizer_of(model.plan.config)
        from_first_rank(self._check)

    def _check(self) -> None:
        check_metric(self._plan.config.checkpoint.save_best, check_tasks(self._plan.config, self._tokenizer))

    def load(self, engine: Engine, start: RunStart) -> None:
        """Let the tokenizer's texts end as the run's settings of generation say; ids that it knows change nothing."""
        add_end_ids(self._tokenizer, engine.run_files.generation_settings, str(self._plan.config.checkpoint.load))

    def further_evaluations(self, engine: Engine) -> Mapping[str, Mapping[str, float]]:
        """Return the scores. All ranks call it together."""
        return {
            "tasks": evaluate_in_training(
                self._plan, engine.deepspeed_engine, engine.grid, engine.device, self._tokenizer
            )
        }


def check_metric(metric: str | None, scalars: TaskScalars) -> None:
    """Check that tasks report the metric of `save_best`, if it is one of theirs. Raises ConfigError if none can."""
    if metric is None or not metric.startswith("eval/") or is_scalar_of(metric, scalars.known):
        return
    reason = f"save_best: {unknown_scalar(metric, scalars.known)}"
    if not is_scalar_of(metric, scalars.possible):
        raise ConfigError(reason)
    _log.warning("%s (its task may report more than it lists: the first evaluation tells)", reason)
