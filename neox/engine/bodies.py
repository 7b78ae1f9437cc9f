"""DeepSpeed's two engines, as this library uses them: the pipeline body and the plain body.

Both leave weights out of DeepSpeed's own files: weights go to layer files in every layout (see `saving`).
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero.partition_parameters import Init
from torch import Tensor, nn

from neox.config import RunPlan
from neox.engine.deepspeed_log import unprinted
from neox.engine.grid_mpu import GridMPU
from neox.engine.pipeline import PipelineGPT
from neox.model import GPT, TransformerLayer, build_layer
from neox.optim import NormScope, build_optimizer
from neox.parallel import ParallelGrid

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_NEVER = 2**31


class PlainBody(DeepSpeedEngine):
    """The whole network on each rank (or its tensor part); ZeRO 0 to 3."""

    def module_state_dict(self, *args: Any, **kwargs: Any) -> None:
        return None

    def _copy_recovery_script(self, save_path: str) -> None:
        """Not wanted: `zero_to_fp32.py` looks for weights where there are none."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Scale the loss where DeepSpeed forgets to: its fp16 wrapper for ZeRO 0 divides gradients by the loss scale,
        but its engine multiplies the loss for ZeRO's own optimizers alone (0.19.8)."""
        scaling = getattr(self.optimizer, "loss_scale_config", None)
        if scaling is not None and scaling.use_grad_scaling:
            loss = loss.float() * scaling.cur_scale
        return super().backward(loss, *args, **kwargs)


class PipelineBody(PipelineEngine, PlainBody):
    """Pipeline stages; ZeRO 0 and 1. `PipelineEngine` finds `PlainBody.backward` as its parent's."""

    module_state_dict = PlainBody.module_state_dict


Body = PlainBody


def build_model(plan: RunPlan, grid: ParallelGrid, device: torch.device) -> nn.Module:
    """Return this rank's part of the network with its initial weights, in the precision of training."""
    dtype = DTYPES[plan.precision]
    if plan.config.deepspeed.zero_optimization.stage == 3:
        return _divided_model(plan, grid, device, dtype)
    body = PipelineGPT if grid.pp_size > 1 else GPT
    model = body(plan, grid, device=device, dtype=dtype)
    if plan.config.training.compile_layers:
        for module in model.modules():
            if isinstance(module, TransformerLayer):
                module.compile()  # in place: names stay, and layers alike share one compiled graph
    return model


def _divided_model(plan: RunPlan, grid: ParallelGrid, device: torch.device, dtype: torch.dtype) -> GPT:
    """Build for ZeRO 3: each layer is divided over data ranks before the next is built, so that a model larger than a
    device can be made."""
    model = GPT(plan, grid, device="meta", dtype=dtype)
    config, mpu = runtime_json(plan), GridMPU(grid)
    for entry in plan.layers:
        layer = build_layer(plan, entry.index, grid, device=device, dtype=dtype)
        if entry.parameters:
            Init(module=layer, data_parallel_group=grid.dp_group, config_dict_or_path=config, dtype=dtype, mpu=mpu)
        model.sequential[entry.index] = layer
    return model


def build_body(plan: RunPlan, grid: ParallelGrid, model: nn.Module) -> tuple[Body, torch.optim.AdamW]:
    """Hand a model to DeepSpeed; return its engine and the AdamW that moves the weights (DeepSpeed may wrap it)."""
    clips = clips_itself(plan)
    scope = NormScope(grid.model_group, lambda p: _counts(p, grid)) if clips else None
    optimizer = build_optimizer(plan, model.named_parameters(), scope)
    config = runtime_json(plan)
    pipeline = isinstance(model, PipelineGPT)
    mpu = model.mpu() if pipeline else GridMPU(grid)
    kind = PipelineBody if pipeline else PlainBody
    with unprinted():
        body = kind(
            args=None,
            model=model,
            optimizer=optimizer,
            mpu=mpu,
            dist_init_required=False,
            config=config,
            config_class=DeepSpeedConfig(config, mpu),
        )
    # Some of DeepSpeed's wrappers take a step on zero gradients to allocate the optimizer's state; the learning rate is
    # 0 so far, so weights did not move, but Adam's step counter did.
    optimizer.state.clear()
    return body, optimizer


def clips_itself(plan: RunPlan) -> bool:
    """Whether our optimizer clips and checks: with ZeRO 0, except where DeepSpeed's bf16 pipeline optimizer does."""
    stage = plan.config.deepspeed.zero_optimization.stage
    return stage == 0 and not (plan.precision == "bf16" and plan.grid.pp_size > 1)


def runtime_json(plan: RunPlan) -> dict[str, Any]:
    """Return the plan's DeepSpeed configuration, less what is done here in DeepSpeed's place.

    The optimizer and (with ZeRO 0) clipping are ours; DeepSpeed's progress lines appear only when asked for.
    """
    config = copy.deepcopy(dict(plan.deepspeed))
    config.pop("optimizer", None)
    if clips_itself(plan):
        config["gradient_clipping"] = 0.0
    if not plan.config.given("steps_per_print"):
        config["steps_per_print"] = _NEVER
    if plan.precision == "bf16":
        # Without it a NaN gradient is applied (ZeRO 2) in bf16; fp16 and fp32 always check.
        config["bf16"] = {"check_grad_overflow": True, **config.get("bf16", {})}
    return config


def _counts(parameter: torch.Tensor, grid: ParallelGrid) -> bool:
    """Whether this rank counts a parameter in the gradient norm: neither a tied nor a replicated copy."""
    if getattr(parameter, "ds_pipe_replicated", False):
        return False
    return grid.tp_rank == 0 or getattr(parameter, "model_parallel", False)
