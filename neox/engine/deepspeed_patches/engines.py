"""DeepSpeed's plain and pipeline engines with correct gradients, tied weights and scores."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import MappingProxyType
from typing import Any

import deepspeed.runtime.zero.stage3
import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine as DeepSpeedPipelineEngine
from deepspeed.runtime.utils import has_inf_or_nan
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor

from neox.engine.deepspeed_patches.bf16_optimizer import BF16Optimizer
from neox.engine.deepspeed_patches.file_states import SwappedStage3
from neox.engine.measurements import BACKWARD, COMMUNICATION, FORWARD, OPTIMIZER, NoTimers, StepTimers
from neox.optim import ClippedOptimizer


class PlainEngine(DeepSpeedEngine):  # type: ignore[misc]
    """DeepSpeed's engine for the whole network on each rank (or its tensor-parallel part); ZeRO 0 to 3.

    Attributes:
        step_scores: Mean scores [K] of the step over micro batches and data ranks. They are on the device before the
            update is queued.
        step_timers: Timers of the parts of a step.
    """

    step_scores: Tensor
    step_timers: StepTimers | NoTimers = NoTimers()

    def module_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Return no weights for DeepSpeed's checkpoint files.

        DeepSpeed writes all weights of a model rank into one file. Here they are in layer files in every layout.
        """

    def _copy_recovery_script(self, save_path: str) -> None:
        """Do nothing.

        DeepSpeed copies `zero_to_fp32.py` into checkpoints, a script that looks for the weights in DeepSpeed's files.
        """

    def _configure_bf16_optimizer(self, optimizer: torch.optim.Optimizer) -> BF16Optimizer:
        """Build our subclass of DeepSpeed's optimizer for bf16, with DeepSpeed's arguments."""
        return BF16Optimizer(
            optimizer,
            self.param_names,
            bfloat16_config=self._config.bfloat16_config,
            mpu=self.mpu,
            clip_grad=self.gradient_clipping(),
            allgather_bucket_size=self.zero_allgather_bucket_size(),
            dp_process_group=self.seq_data_parallel_group,
            grad_acc_dtype=self.get_data_types()[1],
            has_moe_layers=self.has_moe_layers,
        )

    def _configure_fp16_optimizer(self, optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> Any:
        """Build DeepSpeed's optimizer for fp16, and for bf16 with ZeRO 0.

        DeepSpeed waits for the device at the gradient of each parameter to look for an overflow. Here it waits once.
        """
        wrapper = super()._configure_fp16_optimizer(optimizer, dtype)
        wrapper.overflow_checker.has_overflow_serial = _any_not_finite
        return wrapper

    def _configure_zero_optimizer(self, optimizer: torch.optim.Optimizer) -> Any:
        """Build DeepSpeed's ZeRO optimizer; that of stage 3 can keep states in files (`file_states`)."""
        with _replaced(deepspeed.runtime.zero.stage3, "DeepSpeedZeroOptimizer_Stage3", SwappedStage3):
            return super()._configure_zero_optimizer(optimizer)

    def backward(self, scores: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Scale the loss, which is the first of the scores, and run the backward pass.

        DeepSpeed's fp16 wrapper for ZeRO 0 divides gradients by the loss scale, but its engine multiplies the loss for
        ZeRO's own optimizers only. So gradients are too small by the scale. (Adam hides it; clipping never acts.)
        """
        scaling = getattr(self.optimizer, "loss_scale_config", None)
        loss = scores[0]
        if scaling is not None and scaling.use_grad_scaling:
            loss = loss.float() * scaling.cur_scale
        return super().backward(loss, *args, **kwargs)

    def allreduce_gradients(self, *args: Any, **kwargs: Any) -> None:
        """Average gradients over data ranks, and measure how long that takes."""
        with self.step_timers.part(COMMUNICATION):
            super().allreduce_gradients(*args, **kwargs)

    def buffered_allreduce_fallback(self, grads: Any = None, *args: Any, **kwargs: Any) -> None:
        """Average gradients over data ranks, if there are several.

        DeepSpeed copies all gradients into one buffer and back, for a single rank too. Parameters without a gradient
        get zeros, as there.
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
        """Release the gradients. DeepSpeed walks over all modules to find the parameters."""
        if not isinstance(self.optimizer, ClippedOptimizer):
            super().zero_grad()
            return
        for parameter in _parameters(self.optimizer):
            parameter.grad = None


def _any_not_finite(parameters: Iterable[Tensor]) -> bool:
    """Return whether any gradient holds an infinity or a NaN."""
    found = [has_inf_or_nan(p.grad) for p in parameters if p.grad is not None]
    if not found:
        return False
    return bool(torch.stack(found).any())


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


@contextmanager
def _replaced(holder: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute while the context lasts."""
    original = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, original)


def _timed(part: str, instruction: Callable[..., Any]) -> Callable[..., Any]:
    """Return an instruction of the pipeline's schedule whose time is added to a part of the step."""

    @wraps(instruction)
    def timed(engine: PlainEngine, *args: Any, **kwargs: Any) -> Any:
        with engine.step_timers.part(part):
            return instruction(engine, *args, **kwargs)

    return timed


class PipelineEngine(DeepSpeedPipelineEngine, PlainEngine):  # type: ignore[misc]
    """DeepSpeed's engine for pipeline stages; ZeRO 0 and 1. Its `backward` calls `PlainEngine.backward`."""

    module_state_dict = PlainEngine.module_state_dict

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # DeepSpeed compares types for equality. Gradients of tied weights would not be summed over stages.
        self.using_bf16_optimizer = isinstance(self.optimizer, BF16Optimizer)

    def _forward_pass(self, buffer_id: int) -> None:
        """Run a micro batch through this stage; the last one computes the scores in its module.

        DeepSpeed calls a loss function after the module. Its engine prepares for a backward pass when the gradient of
        the module's output arrives, and clears gradients of the head that came before.
        """
        if self.is_last_stage():
            self.module.targets = self.pipe_buffers["labels"][buffer_id]
        loss_scale = float(self.optimizer.loss_scale) if self.fp16_enabled() else 1.0
        self.module.loss_factor = loss_scale / self.gradient_accumulation_steps()
        try:
            self._exec_forward_pass(buffer_id)
        finally:
            self.module.targets = None

    def _reduce_tied_gradients(self) -> None:
        """Sum the gradients of tied weights over their stages.

        DeepSpeed sums `grad`, but its ZeRO optimizer (of bf16 with offload) has moved them to `grad_accum` by then. The
        copies of tied weights drift apart.
        """
        if not isinstance(self.optimizer, DeepSpeedZeroOptimizer):
            self._exec_reduce_tied_grads()
            return
        for weight, group in self.module.get_tied_weights_and_groups():
            gradient = self.optimizer.get_gradient_for_reduction(weight)
            if gradient is not None:
                dist.all_reduce(gradient, group=group)

    def _train_schedule(self) -> schedule.PipeSchedule:
        """Return the instructions of this stage in a training step. DeepSpeed knows no schedule but 1F1B."""
        kind = self.module.train_schedule
        return kind(micro_batches=self.micro_batches, stages=self.num_stages, stage_id=self.stage_id)

    def eval_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate. DeepSpeed adds the scores of an evaluation to those of the last training step."""
        self.total_loss = None
        return super().eval_batch(*args, **kwargs)

    def _bcast_pipe_scalar(self, data: Tensor | None, *args: Any, **kwargs: Any) -> Tensor:
        """Send an evaluation's scores [K] from the last stage to all. DeepSpeed expects a single number."""
        last = self._loss_stage_global_rank()
        scores = torch.zeros(self.module.score_count, device=self.device)
        if data is not None:
            scores += data.detach()
        dist.broadcast(scores, src=last, group=self.mpu.get_pipe_parallel_group())
        return scores

    def _optimizer_step(self) -> None:
        """Agree on the step's scores, and update.

        DeepSpeed updates first, and the host waits for both. Here a host can read the scores while the device updates.
        """
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

    _DEEPSPEEDS = DeepSpeedPipelineEngine._INSTRUCTION_MAP
    _INSTRUCTION_MAP = MappingProxyType(
        {
            **_DEEPSPEEDS,
            schedule.ForwardPass: _timed(FORWARD, _forward_pass),
            schedule.BackwardPass: _timed(BACKWARD, _DEEPSPEEDS[schedule.BackwardPass]),
            schedule.OptimizerStep: _timed(OPTIMIZER, _optimizer_step),
            schedule.ReduceGrads: _timed(COMMUNICATION, _DEEPSPEEDS[schedule.ReduceGrads]),
            schedule.ReduceTiedGrads: _timed(COMMUNICATION, _reduce_tied_gradients),
            schedule.SendActivation: _timed(COMMUNICATION, _DEEPSPEEDS[schedule.SendActivation]),
            schedule.RecvActivation: _timed(COMMUNICATION, _DEEPSPEEDS[schedule.RecvActivation]),
            schedule.SendGrad: _timed(COMMUNICATION, _DEEPSPEEDS[schedule.SendGrad]),
            schedule.RecvGrad: _timed(COMMUNICATION, _DEEPSPEEDS[schedule.RecvGrad]),
        }
    )
