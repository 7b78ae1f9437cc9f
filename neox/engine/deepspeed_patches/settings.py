"""What DeepSpeed is not asked to do, because it does it wrong or this library does it."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor

from neox.parallel import ParallelGrid
from neox.plan import RunPlan

_NEVER = 2**31


def runtime_json(plan: RunPlan) -> dict[str, Any]:
    """Return DeepSpeed's configuration of a plan, without what this library does itself.

    The optimizer is ours, and so are clipping with ZeRO 0 (`clips_itself`) and the timers. Messages between stages are
    divided over tensor ranks by `Mailbox`, which knows when these hold the same. DeepSpeed's own timers wait
    for the device before and after each micro batch; they run only for the profile of operations, which needs them.
    """
    config = copy.deepcopy(dict(plan.deepspeed))
    config.pop("optimizer", None)
    # DeepSpeed knows its own optimizers only. Any that updates each element by itself can be divided over ranks.
    config["zero_allow_untested_optimizer"] = True
    if clips_itself(plan):
        config["gradient_clipping"] = 0.0
    if plan.grid.pp_size > 1:
        config["pipeline"] = {"pipe_partitioned": False, "grad_partitioned": False}
    profiler = plan.config.deepspeed.flops_profiler
    if profiler is None or not profiler.enabled:
        config["wall_clock_breakdown"] = False
    config["timers"] = {"throughput": {"enabled": plan.config.deepspeed.wall_clock_breakdown}}
    if not plan.config.given("steps_per_print"):
        config["steps_per_print"] = _NEVER
    return config


def clips_itself(plan: RunPlan) -> bool:
    """Return whether our optimizer computes the gradient norm and clips, instead of DeepSpeed: with ZeRO 0.

    With ZeRO 0 DeepSpeed's norm is wrong. In fp16 and bf16 it is computed from gradient tensors that lack their
    parameters' attributes: split parameters of tensor ranks above 0 are left out, and tied copies are counted twice.
    In fp32 with stages replicated parameters are counted on the first stage only. DeepSpeed's optimizer for bf16 with
    stages is right.
    """
    stage = plan.config.deepspeed.zero_optimization.stage
    is_bf16_pipeline = plan.precision == "bf16" and plan.grid.pp_size > 1
    return stage == 0 and not is_bf16_pipeline


def counts_in_norm(parameter: Tensor, grid: ParallelGrid) -> bool:
    """Return whether this rank counts a parameter in the gradient norm: neither a tied nor a replicated copy."""
    if getattr(parameter, "ds_pipe_replicated", False):
        return False
    return grid.tp_rank == 0 or getattr(parameter, "model_parallel", False)
