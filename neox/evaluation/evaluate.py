"""Evaluation of a configuration's tasks, with a loaded model or one in training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import cast

import torch
from torch import nn

from neox.config import NeoXConfig
from neox.evaluation.harness import harness_scalars, harness_tasks, open_tasks
from neox.evaluation.lambada import lambada
from neox.evaluation.needle import needle
from neox.evaluation.perplexity import corpus_perplexity, wikitext
from neox.evaluation.results import TaskResult, flat_metrics
from neox.evaluation.scoring import Scorer, ScoringModel
from neox.evaluation.tasks import TaskScalars, check_file_tasks, file_task_scalars, parse_tasks
from neox.generation.load import runner_of_forward, runner_of_stage
from neox.model import Stage
from neox.parallel import ParallelGrid
from neox.plan import RunPlan
from neox.tokenizer import Tokenizer

SCORERS: Mapping[str, Callable[[str | Path, Scorer, str], TaskResult]] = MappingProxyType(
    {"wikitext": wikitext, "lambada": lambada, "perplexity": corpus_perplexity, "needle": needle}
)


def check_tasks(config: NeoXConfig, tokenizer: Tokenizer) -> TaskScalars:
    """Check `eval_tasks` without a model, and return the scalars that they report. The harness loads its data.

    Raises:
        EvaluationError: For everything that an evaluation would refuse.
    """
    check_file_tasks(config, tokenizer)
    files, names = parse_tasks(config.generation.eval_tasks or ())
    known = file_task_scalars(files)
    if not names:
        return TaskScalars(known, [])
    of_harness = harness_scalars(names, open_tasks(names))
    return TaskScalars([*known, *of_harness.known], of_harness.possible)


def evaluate_tasks(
    tasks: Sequence[str], model: ScoringModel, tokenizer: Tokenizer, grid: ParallelGrid, config: NeoXConfig
) -> list[TaskResult]:
    """Evaluate tasks with a model. All ranks call it together and get the same results.

    Args:
        tasks: Tasks in the form of `eval_tasks`.
        model: Model to evaluate.
        tokenizer: Tokenizer of the model.
        grid: Process groups. Data-parallel ranks divide the texts among themselves.
        config: Configuration. Windows are `seq_length` tokens long.

    Raises:
        EvaluationError: For unknown tasks, before anything is scored.
    """
    file_tasks, names = parse_tasks(tasks)
    manager = open_tasks(names) if names else None
    keys = config.generation
    assert config.model.seq_length
    scorer = Scorer(
        model,
        tokenizer,
        grid,
        config.model.seq_length,
        stride=keys.eval_stride,
        batch_size=keys.generation_batch_size,
        limit=keys.eval_limit,
    )
    results = [SCORERS[task.kind](task.path, scorer, task.name) for task in file_tasks]
    if manager is not None:
        results += harness_tasks(names, manager, scorer, num_fewshot=keys.eval_num_fewshot, limit=keys.eval_limit)
    return results


def evaluate_in_training(
    plan: RunPlan, module: nn.Module, grid: ParallelGrid, device: torch.device, tokenizer: Tokenizer
) -> dict[str, float]:
    """Evaluate the configuration's `eval_tasks` with a model in training. All ranks call it together.

    Args:
        plan: Plan of the training run.
        module: DeepSpeed's engine, which passes on the attributes of the model in training. Its training mode is
            restored. No random numbers of torch are used.
        grid: Process groups.
        device: Device of the module.
        tokenizer: Tokenizer of the run.

    Returns:
        `eval/<task>_<metric>` -> value.
    """
    training = module.training
    module.eval()
    try:
        if plan.config.deepspeed.zero_optimization.stage == 3:  # only a call of the engine gathers the weights
            model = runner_of_forward(plan, module, grid, device)
        else:
            model = runner_of_stage(plan, cast(Stage, module.stage), grid, device)
        tasks = plan.config.generation.eval_tasks or ()
        return flat_metrics(evaluate_tasks(tasks, model, tokenizer, grid, plan.config))
    finally:
        module.train(training)
