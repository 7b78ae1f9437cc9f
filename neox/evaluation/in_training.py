"""Tasks scored while a model is in training, on the ranks that train it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from neox.config import RunPlan
from neox.evaluation.job import evaluate_tasks
from neox.evaluation.result import flat_metrics
from neox.generation import ModelRunner, runner_of_forward, runner_of_layers
from neox.parallel import ParallelGrid
from neox.tokenizer import Tokenizer


@runtime_checkable
class StageModule(Protocol):
    """A pipeline stage: knows its layers that hold weights, by index in the layer plan."""

    def weight_layers(self) -> Iterator[tuple[int, nn.Module]]: ...


def evaluate_in_training(
    plan: RunPlan, module: nn.Module, grid: ParallelGrid, device: torch.device, tokenizer: Tokenizer
) -> dict[str, float]:
    """Score the configuration's `eval_tasks` and return `eval/<task>_<metric>` -> value; all ranks together.

    module: a pipeline stage, or the whole network as it is called in training (DeepSpeed's engine around it, so that
    ZeRO-3 gathers its weights). It comes back in the mode it was in. Nothing is drawn from torch's random streams.
    """
    tasks = plan.config.generation.eval_tasks or ()
    with evaluation_mode(module):
        model = training_runner(plan, module, grid, device)
        return flat_metrics(evaluate_tasks(tasks, model, tokenizer, grid, plan.config))


def training_runner(plan: RunPlan, module: nn.Module, grid: ParallelGrid, device: torch.device) -> ModelRunner:
    """Return a runner of a model in training."""
    if isinstance(module, StageModule):
        return runner_of_layers(plan, dict(module.weight_layers()), grid, device)
    return runner_of_forward(plan, module, grid, device)


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Switch dropout and the like off, and back to what they were."""
    training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(training)
