"""Gradient noise scale: how noisy the gradient of a batch is (`log_gradient_noise_scale`).

The "simple" noise scale tr(S) / |G|^2 of arXiv:1812.06162 (appendix A.1), estimated as gpt-neox does from the gradient
of one step, the small batch, and the mean gradient of several successive ones, the large batch.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from neox.optim import ClippedOptimizer

_DECAY = 0.99  # of both moving averages; gpt-neox's


class NoiseScale:
    """Estimate of the gradient noise scale, from the gradients that an optimizer is given.

    Ranks of one copy of the model add up what each holds. A resumed run begins the averages anew, as in gpt-neox.

    Args:
        optimizer: Has the scope of its norm (ZeRO 0); its gradients are means over the batch, before clipping.
        batch: Samples of one step.
        steps: Successive steps whose mean gradient is the large batch.
        on_cpu: Whether the sum of their gradients is kept in CPU memory.

    Attributes:
        value: The estimate in samples; None until there is one.
    """

    def __init__(self, optimizer: ClippedOptimizer, *, batch: int, steps: int, on_cpu: bool) -> None:
        self.value: float | None = None
        self._optimizer, self._batch, self._steps, self._on_cpu = optimizer, batch, steps, on_cpu
        self._sum: list[Tensor] = []
        self._added = 0
        self._trace = self._square = 0.0
        optimizer.register_step_pre_hook(self._observe)

    @torch.no_grad()
    def _observe(self, *_: Any) -> None:
        """Take the gradients of one step; those that are not finite do not count."""
        gradients = self._optimizer.counted_gradients()
        small = self._squared_norm(gradients)
        if not math.isfinite(small):
            return
        if self._on_cpu:
            gradients = [gradient.cpu() for gradient in gradients]
        if not self._sum:
            self._sum = [gradient.clone() for gradient in gradients]
        else:
            torch._foreach_add_(self._sum, gradients)
        self._added += 1
        if self._added < self._steps:
            return
        large = self._squared_norm(self._sum) / self._steps**2
        self._sum, self._added = [], 0
        self._update(small, large)

    def _update(self, small: float, large: float) -> None:
        """Add the squared norms of a gradient of a small and a large batch.

        gpt-neox divides both averages by the same correction for their start, so their quotient needs none.
        """
        fewer, more = self._batch, self._batch * self._steps
        trace = (small - large) / (1 / fewer - 1 / more)
        square = (more * large - fewer * small) / (more - fewer)
        self._trace = _DECAY * self._trace + (1 - _DECAY) * trace
        self._square = _DECAY * self._square + (1 - _DECAY) * square
        self.value = self._trace / self._square if self._square else None

    def _squared_norm(self, gradients: list[Tensor]) -> float:
        """Return the squared norm over all ranks of a copy of the model."""
        total = torch.zeros((), device=self._optimizer.param_groups[0]["params"][0].device)
        if gradients:
            total += torch.stack(torch._foreach_norm(gradients)).square().sum()
        scope = self._optimizer.scope
        if scope is not None and scope.group is not None:
            dist.all_reduce(total, group=scope.group)
        return float(total)
