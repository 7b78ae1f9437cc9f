"""DeepSpeed's engine for the whole network on each rank, with correct gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed.runtime.zero.stage3
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.utils import has_inf_or_nan
from torch import Tensor

from neox.engine.deepspeed_patches.bf16_optimizer import BF16Optimizer
from neox.engine.deepspeed_patches.file_states import SwappedStage3
from neox.engine.measurements import COMMUNICATION, NoTimers, Timers
from neox.optim import ClippedOptimizer


class PlainEngine(DeepSpeedEngine):  # type: ignore[misc]
    """DeepSpeed's engine for the whole network on each rank (or its tensor-parallel part); ZeRO 0 to 3.

    Attributes:
        step_scores: Mean scores [K] of the step over micro batches and data ranks. They are on the device before the
            update is queued.
        step_timers: Timers of the parts of a step.
    """

    step_scores: Tensor
    step_timers: Timers = NoTimers()

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
