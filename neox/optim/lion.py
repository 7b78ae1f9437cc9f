"""Lion."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from neox.optim.clipping import ClippedOptimizer, pieces


class Lion(ClippedOptimizer):
    """Lion (arXiv:2302.06675, program 1): steps are the sign of an average of momentum and gradient.

    Args:
        groups: Parameter groups of `parameter_groups`.
        lr: Learning rate, by which every weight moves.
        betas: Share of the momentum in the direction of a step, and decay rate of the momentum.
        clipping: Further arguments of `ClippedOptimizer`.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.99),
        **clipping: Any,
    ) -> None:
        super().__init__(groups, defaults={"lr": lr, "betas": betas}, **clipping)

    def update_group(self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]) -> None:
        """Update a group's parameters."""
        share, decay = group["betas"]
        for weights, slopes, momentum in pieces(parameters, gradients, self.states(parameters, "exp_avg")):
            torch._foreach_mul_(weights, 1.0 - group["lr"] * group["weight_decay"])
            directions = torch._foreach_mul(momentum, share)
            torch._foreach_add_(directions, slopes, alpha=1.0 - share)
            torch._foreach_sign_(directions)
            torch._foreach_add_(weights, directions, alpha=-group["lr"])
            torch._foreach_mul_(momentum, decay)
            torch._foreach_add_(momentum, slopes, alpha=1.0 - decay)
