"""The best checkpoint on paper."""

from __future__ import annotations

from collections.abc import Iterator

from neox.config.neox_config import NeoXConfig
from neox.plan.feature import FeaturePaper
from neox.problems import Problem

_GROUPS = ("validation/", "validation_ema/", "eval/")


def problems(config: NeoXConfig) -> Iterator[Problem]:
    """The metric must be one of evaluations, and an evaluation must meet a save before the last step.

    Which scalars the evaluations of the run report, `neox.preflight.score_checks` says.
    """
    metric = config.checkpoint.save_best
    if metric is None:
        return
    if not metric.startswith(_GROUPS):
        yield config.problem("save_best", f"names no scalar of evaluations, which begin with {', '.join(_GROUPS)}")
        return
    if metric.startswith("validation_ema/") and not config.optimizer.eval_ema:
        yield config.problem("save_best", "is a scalar of averaged weights, which `eval_ema: true` evaluates")
    if metric.startswith("eval/") and not config.generation.eval_tasks:
        yield config.problem("save_best", "is a score of a task, and `eval_tasks` names none")
    steps = config.training.train_iters
    interval = config.training.eval_interval
    saved = config.checkpoint.save_iterations(steps)
    if len(saved) > 1 and not any(step % interval == 0 for step in saved[:-1]):
        message = (
            f"`eval_interval: {interval}` evaluates after none of the steps that are saved before the last one "
            f"({', '.join(map(str, saved[:3]))} ...), so that save_best compares nothing"
        )
        yield config.problem_about(message, "save_best", "eval_interval", "checkpoint_factor")


PAPER = FeaturePaper(problems=problems, off=("save_best=null",))
