"""AdamW with torch's fused kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from neox.optim.clipping import ClippedOptimizer


class AdamW(ClippedOptimizer, torch.optim.AdamW):
    """AdamW (arXiv:1711.05101) with torch's fused kernel, which divides gradients while it reads them.

    Args:
        groups: Parameter groups of `parameter_groups`.
        lr: Learning rate.
        betas: Decay rates of the moments.
        eps: Number added to the denominator.
        clipping: Further arguments of `ClippedOptimizer`.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        **clipping: Any,
    ) -> None:
        super().__init__(groups, lr=lr, betas=betas, eps=eps, fused=True, **clipping)

    def update(self, divisor: Tensor | None) -> None:
        """Update all parameters."""
        for group in self.param_groups:
            self._update_fused(group, divisor)

    def _update_fused(self, group: dict[str, Any], divisor: Tensor | None) -> None:
        """Update the parameters of a group in one kernel."""
        parameters: list[Tensor] = []
        grads: list[Tensor] = []
        means: list[Tensor] = []
        squares: list[Tensor] = []
        steps: list[Tensor] = []
        self._init_group(group, parameters, grads, means, squares, [], steps)
        if not parameters:
            return
        torch._foreach_add_(steps, 1)
        torch._fused_adamw_(
            parameters,
            grads,
            means,
            squares,
            [],
            steps,
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            grad_scale=divisor,
        )
