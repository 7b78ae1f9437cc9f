"""Construction of the training engine: model, optimizer, DeepSpeed's engine and the way its steps run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from deepspeed.runtime.config import DeepSpeedConfig
from torch import nn

from neox.engine.deepspeed_patches import (
    PipelineEngine,
    PlainEngine,
    clips_itself,
    counts_in_norm,
    hidden_stdout,
    runtime_json,
)
from neox.engine.deepspeed_patches.startup import import_muon_uncompiled
from neox.engine.distributed import grid_mpu
from neox.engine.engine import Engine
from neox.engine.measurements import NoTimers, StepTimers
from neox.engine.network import build_model
from neox.engine.optimizer_tensors import matrix_parts, optimizer_tensors, parameter_names
from neox.engine.pipeline import PipelineGPT
from neox.engine.steps import PipelineSteps, PlainSteps, Steps
from neox.objectives import Objective, build_objective
from neox.optim import ClippedOptimizer, Muon, NormScope, build_optimizer
from neox.parallel import ParallelGrid
from neox.plan import RunPlan


def initialize_engine(plan: RunPlan, grid: ParallelGrid, device: torch.device) -> Engine:
    """Build the network with its initial weights and give it to DeepSpeed; all ranks call it together."""
    objective = build_objective(plan)
    model = build_model(plan, grid, objective, device)
    return build_engine(plan, grid, device, objective, model)


def build_engine(
    plan: RunPlan, grid: ParallelGrid, device: torch.device, objective: Objective, model: nn.Module
) -> Engine:
    """Give a model to DeepSpeed, with an optimizer; all ranks call it together.

    Only this function and `build_model` know which kinds of engine there are.
    """
    optimizer = build_optimizer(plan, model.named_parameters(), _norm_scope(plan, grid))
    timers = StepTimers(device) if plan.config.deepspeed.wall_clock_breakdown else NoTimers()
    steps: Steps
    if isinstance(model, PipelineGPT):
        pipeline = _deepspeed_engine(PipelineEngine, plan, model, model.mpu(), optimizer)
        steps = PipelineSteps(pipeline, objective, grid, device)
    else:
        plain = _deepspeed_engine(PlainEngine, plan, model, grid_mpu(grid), optimizer)
        steps = PlainSteps(plain, objective, grid, device, timers)
    steps.engine.step_timers = timers
    # Some of DeepSpeed's wrappers take a step on zero gradients to allocate the optimizer's state. The learning rate is
    # 0 so far, so weights did not change, but the counter of steps and momenta did.
    optimizer.state.clear()
    if isinstance(optimizer, Muon):
        _locate_matrices(optimizer, plan, grid, steps.engine)
    return Engine(plan, grid, device, objective, steps, optimizer, timers)


def _norm_scope(plan: RunPlan, grid: ParallelGrid) -> NormScope | None:
    """Return the ranks and parameters of the gradient norm if our optimizer computes it; None if DeepSpeed does."""
    if not clips_itself(plan):
        return None
    group = grid.model_group if grid.pp_size * grid.tp_size > 1 else None
    return NormScope(group, lambda parameter: counts_in_norm(parameter, grid))


def _deepspeed_engine(
    kind: Callable[..., Any], plan: RunPlan, model: nn.Module, mpu: Any, optimizer: ClippedOptimizer
) -> Any:
    """Return DeepSpeed's engine of a kind."""
    config = runtime_json(plan)
    import_muon_uncompiled()
    with hidden_stdout():
        return kind(
            args=None,
            model=model,
            optimizer=optimizer,
            mpu=mpu,
            dist_init_required=False,
            config=config,
            config_class=DeepSpeedConfig(config, mpu),
        )


def _locate_matrices(optimizer: Muon, plan: RunPlan, grid: ParallelGrid, engine: PlainEngine) -> None:
    """Tell Muon which parts of matrices its tensors hold if DeepSpeed replaced the parameters by flat tensors."""
    if engine.optimizer is optimizer:
        return
    tensors = tuple(optimizer_tensors(plan, grid, engine.module, engine.optimizer, optimizer))
    names = parameter_names(engine.module, plan.layers)
    optimizer.parts = matrix_parts(grid, engine.module, names, tensors)
    optimizer.device = engine.device
