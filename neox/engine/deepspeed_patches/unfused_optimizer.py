"""DeepSpeed's optimizer for fp16, and for bf16 with ZeRO 0, with one look at gradients and one wait for the device."""

from __future__ import annotations

import math
from typing import Any

import torch
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from torch import Tensor

from neox.optim import ClippedOptimizer


class UnfusedOptimizer(FP16_UnfusedOptimizer):  # type: ignore[misc]
    """Optimizer of half-precision weights with an fp32 copy of each.

    DeepSpeed looks for infinities in every gradient, computes a norm that is not the model's (`clips_itself`), and
    waits for the device at both; our optimizer then computes the right norm. But a gradient that is not finite has no
    finite norm. So the fp32 norm alone decides here whether the update is skipped: a third of the passes over all
    gradients.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> bool:
        """Unscale, clip and update. A step whose norm is not finite changes no weights; returns whether it is one."""
        assert isinstance(self.optimizer, ClippedOptimizer)
        assert self.optimizer.scope is not None, "with ZeRO 0 our optimizer computes the norm"
        weights: list[Tensor] = []
        copies: list[Tensor] = []
        for group, full_group in zip(self.fp16_groups, self.fp32_groups, strict=True):
            weights += group
            copies += full_group
        gradients: list[Tensor] = []
        for weight, full in zip(weights, copies, strict=True):
            full.grad = torch.zeros_like(full) if weight.grad is None else weight.grad.to(full.dtype)
            gradients.append(full.grad)
        scale = self.loss_scale_config.cur_scale
        if scale != 1.0 and gradients:
            torch._foreach_mul_(gradients, 1.0 / scale)

        norm = self.optimizer.global_norm()  # the host waits
        self.overflow = not math.isfinite(norm)
        if self.overflow:
            skipped: bool = self._skip_invalid_grad_norm()
            return skipped
        self._global_grad_norm = norm
        self._update_scale(False)

        self.optimizer.known_norm = norm
        self.optimizer.step()
        for full in copies:
            full.grad = None
        if weights:
            torch._foreach_copy_([weight.detach() for weight in weights], [full.detach() for full in copies])
        return False
