"""DeepSpeed's plain and pipeline engines, adapted to this library, and the model that each of them trains.

Neither writes weights into DeepSpeed's own files: weights go to layer files in every layout (see `saving`).
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import deepspeed.runtime.engine
import deepspeed.runtime.zero.stage3
import torch
import torch.distributed as dist
from deepspeed.runtime import compiler
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine as DeepSpeedPipelineEngine
from deepspeed.runtime.utils import has_inf_or_nan
from deepspeed.runtime.zero.partition_parameters import Init
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from neox.engine.bf16_optimizer import BF16Optimizer
from neox.engine.compiled import compile_blocks
from neox.engine.deepspeed_log import hidden_stdout
from neox.engine.fp8 import multiply_in_fp8
from neox.engine.optimizer_tensors import matrix_parts, optimizer_tensors, parameter_names
from neox.engine.pipeline import PipelineGPT
from neox.engine.shared import share_parameters
from neox.engine.swap_files import SwappedStage3, move_weights_to_files
from neox.model import GPT, build_layer
from neox.objectives import Objective
from neox.ops import DTYPES
from neox.optim import ClippedOptimizer, Muon, NormScope, build_optimizer
from neox.parallel import ParallelGrid
from neox.plan import RunPlan

_NEVER = 2**31


class PlainEngine(DeepSpeedEngine):  # type: ignore[misc]
    """DeepSpeed's engine for the whole network on each rank (or its tensor-parallel part); ZeRO 0 to 3.

    Attributes:
        step_scores: The step's mean scores [K] over micro batches and data ranks, on the device before the update is
            queued.
    """

    step_scores: Tensor

    def module_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Leave weights out of DeepSpeed's files."""

    def _copy_recovery_script(self, save_path: str) -> None:
        """Leave out `zero_to_fp32.py`, which would look for weights in DeepSpeed's files."""

    def _configure_bf16_optimizer(self, optimizer: torch.optim.Optimizer) -> BF16Optimizer:
        """Build DeepSpeed's optimizer for bf16, with the methods of ours."""
        wrapper: BF16Optimizer = super()._configure_bf16_optimizer(optimizer)
        wrapper.__class__ = BF16Optimizer
        return wrapper

    def _configure_fp16_optimizer(self, optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> Any:
        """Build DeepSpeed's optimizer for fp16, and bf16 with ZeRO 0, which waits for the device at each gradient."""
        wrapper = super()._configure_fp16_optimizer(optimizer, dtype)
        wrapper.overflow_checker.has_overflow_serial = _any_not_finite
        return wrapper

    def backward(self, scores: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Scale the loss, the first of the scores, and run the backward pass.

        DeepSpeed's fp16 wrapper for ZeRO 0 divides gradients by the loss scale, but its engine multiplies the loss for
        ZeRO's own optimizers only (0.19.8).
        """
        scaling = getattr(self.optimizer, "loss_scale_config", None)
        loss = scores[0]
        if scaling is not None and scaling.use_grad_scaling:
            loss = loss.float() * scaling.cur_scale
        return super().backward(loss, *args, **kwargs)

    def buffered_allreduce_fallback(self, grads: Any = None, *args: Any, **kwargs: Any) -> None:
        """Average gradients over data ranks, if there are several.

        DeepSpeed copies all gradients into one buffer and back, for a single rank too (0.19.8). Parameters without a
        gradient get zeros, as there.
        """
        if self.dp_world_size > 1:
            super().buffered_allreduce_fallback(grads, *args, **kwargs)
        elif isinstance(self.optimizer, ClippedOptimizer):
            for parameter in _parameters(self.optimizer):
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        elif grads is None and not hasattr(self.optimizer, "get_grads_for_reduction"):
            self._get_gradients_for_reduction()

    def zero_grad(self) -> None:
        """Release the gradients, without DeepSpeed's walk over all modules."""
        if not isinstance(self.optimizer, ClippedOptimizer):
            super().zero_grad()
            return
        for parameter in _parameters(self.optimizer):
            parameter.grad = None


def _any_not_finite(parameters: Iterable[Tensor]) -> bool:
    """Return whether any gradient holds an infinity or a NaN."""
    found = [has_inf_or_nan(p.grad) for p in parameters if p.grad is not None]
    return bool(torch.stack(found).any()) if found else False


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


class PipelineEngine(DeepSpeedPipelineEngine, PlainEngine):  # type: ignore[misc]
    """DeepSpeed's engine for pipeline stages; ZeRO 0 and 1. Its `backward` calls `PlainEngine.backward`."""

    module_state_dict = PlainEngine.module_state_dict

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # DeepSpeed compares types; without it, gradients of tied weights are not summed over stages.
        self.using_bf16_optimizer = isinstance(self.optimizer, BF16Optimizer)

    def _forward_pass(self, buffer_id: int) -> None:
        """Run a micro batch through this stage; the last one computes the loss in its module."""
        if self.is_last_stage():
            self.module.targets = self.pipe_buffers["labels"][buffer_id]
        try:
            self._exec_forward_pass(buffer_id)
        finally:
            self.module.targets = None

    def _reduce_tied_gradients(self) -> None:
        """Sum the gradients of tied weights over their stages.

        DeepSpeed sums `grad`, but its ZeRO optimizer (of bf16 with offload) has moved them to `grad_accum` by then.
        """
        if not isinstance(self.optimizer, DeepSpeedZeroOptimizer):
            self._exec_reduce_tied_grads()
            return
        for weight, group in self.module.get_tied_weights_and_groups():
            gradient = self.optimizer.get_gradient_for_reduction(weight)
            if gradient is not None:
                dist.all_reduce(gradient, group=group)

    def eval_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate; DeepSpeed would add the scores of an evaluation to those of the last training step."""
        self.total_loss = None
        return super().eval_batch(*args, **kwargs)

    def _bcast_pipe_scalar(self, data: Tensor | None, *args: Any, **kwargs: Any) -> Tensor:
        """Send an evaluation's scores [K] from the last stage to all; DeepSpeed expects one number."""
        last = self._loss_stage_global_rank()
        scores = torch.zeros(self.module.score_count, device=self.device) if data is None else data.detach().float()
        dist.broadcast(scores, src=last, group=self.mpu.get_pipe_parallel_group())
        return scores

    def _optimizer_step(self) -> None:
        """Agree on the step's scores, and update; DeepSpeed does so in the other order, and the host waits for both."""
        scores = torch.zeros(self.module.score_count, device=self.device)
        if self.is_last_stage():
            scores += self.total_loss / self.gradient_accumulation_steps()
            if self.dp_world_size > 1:
                dist.all_reduce(scores, group=self.mpu.get_data_parallel_group())
                scores /= self.dp_world_size
        dist.broadcast(scores, self._loss_stage_global_rank(), group=self.mpu.get_pipe_parallel_group())
        self.step_scores = scores
        self._exec_optimizer_step()

    def _aggregate_total_loss(self) -> Tensor:
        """Return the loss that `_optimizer_step` has computed."""
        return self.step_scores[0]

    _INSTRUCTION_MAP = MappingProxyType(
        {
            **DeepSpeedPipelineEngine._INSTRUCTION_MAP,
            schedule.ForwardPass: _forward_pass,
            schedule.ReduceTiedGrads: _reduce_tied_gradients,
            schedule.OptimizerStep: _optimizer_step,
        }
    )


def _grid_mpu(grid: ParallelGrid) -> SimpleNamespace:
    """Return a grid without pipeline stages in the form of the "model parallel unit" that DeepSpeed expects.

    A pipeline has DeepSpeed's own, of the same rank order.
    """
    assert grid.pp_size == 1, grid
    tensor = (grid.tp_rank, grid.tp_size, grid.tp_group)
    pipe = (0, 1, grid.pp_group)
    axes = {
        "model_parallel": tensor,
        "tensor_model_parallel": tensor,
        "slice_parallel": tensor,
        "pipeline_model_parallel": pipe,
        "pipe_parallel": pipe,
        "data_parallel": (grid.dp_rank, grid.dp_size, grid.dp_group),
    }
    methods: dict[str, Callable[[], Any]] = {"get_global_rank": lambda: grid.rank}
    for axis, values in axes.items():
        for what, value in zip(("rank", "world_size", "group"), values, strict=True):
            methods[f"get_{axis}_{what}"] = partial(_constant, value)
    return SimpleNamespace(**methods)


def _constant(value: Any) -> Any:
    return value


def build_model(plan: RunPlan, grid: ParallelGrid, objective: Objective, device: torch.device) -> nn.Module:
    """Build this rank's part of the network with its initial weights, in the precision of training."""
    dtype = DTYPES[plan.precision]
    model: nn.Module
    if plan.config.deepspeed.zero_optimization.stage == 3:
        model = _partitioned_model(plan, grid, device, dtype)
    elif grid.pp_size > 1:
        model = PipelineGPT(plan, grid, objective, device=device, dtype=dtype)
    else:
        model = GPT(plan, grid, device=device, dtype=dtype)
        share_parameters(enumerate(model.sequential), plan.layers)
    multiply_in_fp8(model, plan, device)
    compile_blocks(model, plan, device)
    return model


def _partitioned_model(plan: RunPlan, grid: ParallelGrid, device: torch.device, dtype: torch.dtype) -> GPT:
    """Build for ZeRO 3: partition each layer over data ranks before the next is built.

    A model larger than a device's memory can thus be built.
    """
    model = GPT(plan, grid, device="meta", dtype=dtype)
    config, mpu = runtime_json(plan), _grid_mpu(grid)
    directory = plan.config.deepspeed.zero_optimization.weights_directory
    for entry in plan.layers:
        layer = build_layer(plan, entry.index, grid, device=device, dtype=dtype)
        if entry.parameters:
            Init(module=layer, data_parallel_group=grid.dp_group, config_dict_or_path=config, dtype=dtype, mpu=mpu)
            if directory is not None:
                move_weights_to_files(layer, Path(directory))
        model.sequential[entry.index] = layer
    share_parameters(enumerate(model.sequential), plan.layers)
    return model


def build_deepspeed_engine(plan: RunPlan, grid: ParallelGrid, model: nn.Module) -> tuple[PlainEngine, ClippedOptimizer]:
    """Give a model to DeepSpeed.

    Returns:
        DeepSpeed's engine, and the optimizer that updates the weights (DeepSpeed may have wrapped it).
    """
    model_group = grid.model_group if grid.pp_size * grid.tp_size > 1 else None
    scope = NormScope(model_group, lambda p: counts_in_norm(p, grid)) if clips_itself(plan) else None
    optimizer = build_optimizer(plan, model.named_parameters(), scope)
    config = runtime_json(plan)
    _prepare_deepspeed()
    kind, mpu = (PipelineEngine, model.mpu()) if isinstance(model, PipelineGPT) else (PlainEngine, _grid_mpu(grid))
    with hidden_stdout():
        engine = kind(
            args=None,
            model=model,
            optimizer=optimizer,
            mpu=mpu,
            dist_init_required=False,
            config=config,
            config_class=DeepSpeedConfig(config, mpu),
        )
    # Some of DeepSpeed's wrappers take a step on zero gradients to allocate the optimizer's state; the learning rate is
    # 0 so far, so weights did not change, but the counter of steps and momenta did.
    optimizer.state.clear()
    if isinstance(optimizer, Muon) and engine.optimizer is not optimizer:
        tensors = tuple(optimizer_tensors(plan, grid, engine.module, engine.optimizer, optimizer))
        optimizer.parts = matrix_parts(grid, engine.module, parameter_names(engine.module, plan.layers), tensors)
        optimizer.device = engine.device
    return engine, optimizer


def _prepare_deepspeed() -> None:
    """Let ZeRO partition our optimizer, keep what it offloads in files, and import its Muon without compiling kernels.

    ZeRO accepts optimizers of its own list only; any that updates each element by itself can be partitioned. It imports
    Muon during every reduction; to compile it takes 10 s of CPU, most of them for the import of torch._dynamo.
    """
    deepspeed.runtime.engine.is_zero_supported_optimizer = lambda optimizer: isinstance(optimizer, ClippedOptimizer)
    deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3 = SwappedStage3
    compile_decorator = compiler.compile
    compiler.compile = lambda: compiler.dummy_decorator
    try:
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    finally:
        compiler.compile = compile_decorator


def clips_itself(plan: RunPlan) -> bool:
    """Return whether our optimizer clips and checks: with ZeRO 0, unless DeepSpeed's bf16 pipeline optimizer does."""
    stage = plan.config.deepspeed.zero_optimization.stage
    return stage == 0 and not (plan.precision == "bf16" and plan.grid.pp_size > 1)


def runtime_json(plan: RunPlan) -> dict[str, Any]:
    """Return the plan's DeepSpeed configuration without what this library does itself.

    The optimizer, (with ZeRO 0) clipping and timers are ours; DeepSpeed's progress lines appear only on request, its
    timers in the profile of operations that needs them.
    """
    config = copy.deepcopy(dict(plan.deepspeed))
    config.pop("optimizer", None)
    if clips_itself(plan):
        config["gradient_clipping"] = 0.0
    profiler = plan.config.deepspeed.flops_profiler
    if profiler is None or not profiler.enabled:
        config["wall_clock_breakdown"] = False
    if not plan.config.given("steps_per_print"):
        config["steps_per_print"] = _NEVER
    # They wait for the device before and after each micro batch; ours measure steps.
    config["timers"] = {"throughput": {"enabled": plan.config.deepspeed.wall_clock_breakdown}}
    if plan.precision == "bf16":
        # Without it a NaN gradient is applied (ZeRO 2) in bf16; fp16 and fp32 always check.
        config["bf16"] = {"check_grad_overflow": True, **config.get("bf16", {})}
    return config


def counts_in_norm(parameter: Tensor, grid: ParallelGrid) -> bool:
    """Return whether this rank counts a parameter in the gradient norm: neither a tied nor a replicated copy."""
    if getattr(parameter, "ds_pipe_replicated", False):
        return False
    return grid.tp_rank == 0 or getattr(parameter, "model_parallel", False)
