"""Gradient noise scale (`log_gradient_noise_scale`)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from neox.engine import Engine, Feature, RunStart, StepResult, TrainedModel
from neox.optim import ClippedOptimizer

_DECAY = 0.99
"""Decay rate of both moving averages, as in gpt-neox."""


def build(model: TrainedModel, start: RunStart) -> NoiseScale | None:
    """Return the estimate; None if it is not logged."""
    keys = model.plan.config.logging
    if not keys.log_gradient_noise_scale:
        return None
    return NoiseScale(
        model.optimizer,
        batch=model.plan.batch.train_batch_size,
        steps=keys.gradient_noise_scale_n_batches,
        on_cpu=keys.gradient_noise_scale_cpu_offload,
    )


class NoiseScale(Feature):
    """Estimate of the gradient noise scale: how noisy the gradient of a batch is (`log_gradient_noise_scale`).

    It is the "simple" noise scale tr(S) / |G|^2 of arXiv:1812.06162 (appendix A.1), estimated as gpt-neox does from the
    gradient of one step, the small batch, and the mean gradient of several successive ones, the large batch.

    Ranks of one copy of the model add up their parts. A resumed run begins the averages anew, as in gpt-neox.

    Args:
        optimizer: Optimizer with a scope of its norm (ZeRO 0). The gradients it is given are means over the batch,
            before clipping.
        batch: Samples of one step.
        steps: Number of successive steps whose mean gradient is the large batch.
        on_cpu: Whether the sum of their gradients is kept in CPU memory.

    Attributes:
        value: The estimate in samples; None until there is one.
    """

    def __init__(self, optimizer: ClippedOptimizer, *, batch: int, steps: int, on_cpu: bool) -> None:
        self.value: float | None = None
        self._optimizer = optimizer
        self._batch = batch
        self._steps = steps
        self._on_cpu = on_cpu
        self._sum: list[Tensor] = []
        self._added = 0
        self._trace = 0.0
        self._square = 0.0

    def after_step(self, engine: Engine, result: StepResult) -> Mapping[str, float]:
        """Return the estimate, once there is one."""
        if self.value is None:
            return {}
        return {"train/noise_scale": self.value}

    @torch.no_grad()
    def before_update(self, engine: Engine) -> None:
        """Take the gradients of one step; those that are not finite do not count."""
        gradients = self._optimizer.counted_gradients()
        small = self._squared_norm(gradients)
        if not math.isfinite(small):
            return
        if self._on_cpu:
            gradients = [gradient.cpu() for gradient in gradients]
        if self._sum:
            torch._foreach_add_(self._sum, gradients)
        else:
            self._sum = [gradient.clone() for gradient in gradients]
        self._added += 1
        if self._added < self._steps:
            return
        large = self._squared_norm(self._sum) / self._steps**2
        self._sum = []
        self._added = 0
        self._update(small, large)

    def _update(self, small: float, large: float) -> None:
        """Add the squared norms of a gradient of a small and a large batch.

        gpt-neox divides both averages by the same correction for their start, so their quotient needs none.
        """
        fewer = self._batch
        more = self._batch * self._steps
        trace = (small - large) / (1 / fewer - 1 / more)
        square = (more * large - fewer * small) / (more - fewer)
        self._trace = _DECAY * self._trace + (1 - _DECAY) * trace
        self._square = _DECAY * self._square + (1 - _DECAY) * square
        if self._square:
            self.value = self._trace / self._square
        else:
            self.value = None

    def _squared_norm(self, gradients: list[Tensor]) -> float:
        """Return the squared norm over all ranks of a copy of the model."""
        total = torch.zeros((), device=self._optimizer.param_groups[0]["params"][0].device)
        if gradients:
            total += torch.stack(torch._foreach_norm(gradients)).square().sum()
        scope = self._optimizer.scope
        if scope is not None and scope.group is not None:
            dist.all_reduce(total, group=scope.group)
        return float(total)
