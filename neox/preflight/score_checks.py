"""What the launcher says about `save_best`: whether evaluations report its metric, and what has changed about it."""

from __future__ import annotations

from pathlib import Path

from neox.errors import DataError, EvaluationError
from neox.metrics import goal_of
from neox.plan import RunPlan
from neox.plan.run_start import requested_start
from neox.problems import Problem


def save_best_problems(plan: RunPlan) -> list[Problem]:
    """Return the problem that no evaluation of a run reports the metric of `save_best`, with the names that are close.

    Or that its name does not say whether it is better small or large, and no key does.

    Scores of lm-evaluation-harness's tasks are known to the ranks, which load the tasks and refuse other names before
    the first step.
    """
    config = plan.config
    metric = config.checkpoint.save_best
    if metric is None:
        return []
    try:
        from neox.evaluation.best_rule import GOAL_UNKNOWN
        from neox.evaluation.evaluation_scalars import (
            BITS_PER_BYTE,
            bytes_unknown,
        )  # torch, which a launcher can do without
        from neox.evaluation.reported_scalars import reported_scalars, validation_without_bytes
        from neox.evaluation.tasks import is_scalar_of, parse_tasks, unknown_scalar

        known = reported_scalars(plan)
        tasks = config.generation.eval_tasks
        of_harness = parse_tasks(tasks, files_here=False)[1] if tasks else []
    except (ModuleNotFoundError, EvaluationError):  # `task_problems` says what is wrong with `eval_tasks`
        return []
    goal_problems = []
    if config.checkpoint.save_best_goal is None and goal_of(metric) is None:
        goal_problems.append(config.problem("save_best", GOAL_UNKNOWN))
    is_of_task = metric.startswith("eval/")
    if is_of_task and of_harness:
        return goal_problems
    if is_scalar_of(metric, known):
        if is_of_task or not metric.endswith(BITS_PER_BYTE):
            return goal_problems
        try:
            lacking = validation_without_bytes(plan, metric)
        except DataError:  # `data_problems` says so
            return []
        if not lacking:
            return []
        return [config.problem_about(bytes_unknown(metric, lacking), "save_best")]
    return [config.problem_about(f"save_best: {unknown_scalar(metric, known)}", "save_best")]


def save_best_notes(plan: RunPlan) -> list[str]:
    """Return the note that a run which resumes compares checkpoints by another metric, goal or data than before."""
    keys = plan.config.checkpoint
    if keys.save_best is None or keys.save is None or not requested_start(plan.config).own_directory:
        return []
    if keys.save_best_goal is None and goal_of(keys.save_best) is None:  # a problem
        return []
    try:
        from neox.checkpoint.save_directory.best import change_of_rule, read_best  # torch, as above
        from neox.evaluation.best_rule import best_rule
    except ModuleNotFoundError:
        return []
    found = read_best(Path(keys.save))
    change = None if found is None else change_of_rule(found, best_rule(plan))
    return [] if change is None else [change]
