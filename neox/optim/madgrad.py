"""MADGRAD with decoupled weight decay."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from neox.optim.clipping import ClippedOptimizer, pieces


class MADGRAD(ClippedOptimizer):
    """MADGRAD (arXiv:2101.11075, algorithm 1) with weight decay of the weights, not of the point x0, as in gpt-neox.

    `eps` is added to the learning rate, too, as in gpt-neox. So a step at learning rate 0 moves weights.

    Args:
        groups: Parameter groups of `parameter_groups`.
        lr: Learning rate.
        momentum: Share of the old weights in the new ones.
        eps: Number added to the cube root.
        clipping: Further arguments of `ClippedOptimizer`.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float = 0.0,
        momentum: float = 0.9,
        eps: float = 1e-6,
        **clipping: Any,
    ) -> None:
        super().__init__(groups, defaults={"lr": lr, "momentum": momentum, "eps": eps}, **clipping)

    def update_group(self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]) -> None:
        """Update a group's parameters."""
        for parameter in parameters:
            if "x0" not in self.state[parameter]:
                self.state[parameter] |= {"step": torch.zeros(()), "x0": parameter.clone()}
        steps = [self.state[parameter]["step"] for parameter in parameters]
        x0 = self.states(parameters, "x0")
        s = self.states(parameters, "s")
        grad_sum_sq = self.states(parameters, "grad_sum_sq")
        lr = group["lr"] + group["eps"]
        momentum = group["momentum"]
        scale = lr * (float(steps[0]) + 1.0) ** 0.5
        for weights, slopes, starts, sums, squares in pieces(parameters, gradients, x0, s, grad_sum_sq):
            torch._foreach_mul_(weights, 1.0 - lr * group["weight_decay"])
            torch._foreach_add_(sums, slopes, alpha=scale)
            torch._foreach_addcmul_(squares, slopes, slopes, value=scale)
            roots = torch._foreach_pow(squares, 1.0 / 3.0)
            torch._foreach_add_(roots, group["eps"])
            targets = torch._foreach_addcdiv(starts, sums, roots, value=-1.0)
            torch._foreach_mul_(weights, momentum)
            torch._foreach_add_(weights, targets, alpha=1.0 - momentum)
        for step in steps:
            step.add_(1)
