"""Lion."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from neox.optim.clipping import ClippedOptimizer, NormScope, pieces


class Lion(ClippedOptimizer):
    """Lion (arXiv:2302.06675, program 1): steps are the sign of an average of momentum and gradient.

    Args:
        groups: As in `ClippedOptimizer`, like `max_norm` and `scope`.
        max_norm: See there.
        scope: See there.
        lr: Learning rate, by which every weight moves.
        betas: Share of the momentum in the direction of a step, and decay rate of the momentum.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        max_norm: float = 0.0,
        scope: NormScope | None = None,
        lr: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.99),
    ) -> None:
        super().__init__(groups, max_norm=max_norm, scope=scope, defaults={"lr": lr, "betas": betas})

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
