"""MADGRAD with decoupled weight decay."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from neox.optim.clipping import ClippedOptimizer, NormScope, pieces


class MADGRAD(ClippedOptimizer):
    """MADGRAD (arXiv:2101.11075, algorithm 1) with weight decay of the weights, not of the point x0, as in gpt-neox.

    `eps` is added to the learning rate, too, as in gpt-neox: so a step at learning rate 0 moves weights.

    Args:
        groups: As in `ClippedOptimizer`, like `max_norm` and `scope`.
        max_norm: See there.
        scope: See there.
        lr: Learning rate.
        momentum: Share of the old weights in the new ones.
        eps: Added to the cube root.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        max_norm: float = 0.0,
        scope: NormScope | None = None,
        lr: float = 0.0,
        momentum: float = 0.9,
        eps: float = 1e-6,
    ) -> None:
        super().__init__(groups, max_norm=max_norm, scope=scope, defaults={"lr": lr, "momentum": momentum, "eps": eps})

    def update_group(self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]) -> None:
        """Update a group's parameters."""
        for p in parameters:
            if "x0" not in self.state[p]:
                self.state[p] |= {"step": torch.zeros(()), "x0": p.clone()}
        states = [self.state[p] for p in parameters]
        kept = (self.states(parameters, name) for name in ("x0", "s", "grad_sum_sq"))
        lr, momentum = group["lr"] + group["eps"], group["momentum"]
        scale = lr * (float(states[0]["step"]) + 1.0) ** 0.5
        for weights, slopes, starts, sums, squares in pieces(parameters, gradients, *kept):
            torch._foreach_mul_(weights, 1.0 - lr * group["weight_decay"])
            torch._foreach_add_(sums, slopes, alpha=scale)
            torch._foreach_addcmul_(squares, slopes, slopes, value=scale)
            roots = torch._foreach_pow(squares, 1.0 / 3.0)
            torch._foreach_add_(roots, group["eps"])
            targets = torch._foreach_addcdiv(starts, sums, roots, value=-1.0)
            torch._foreach_mul_(weights, momentum)
            torch._foreach_add_(weights, targets, alpha=1.0 - momentum)
        for state in states:
            state["step"] += 1
