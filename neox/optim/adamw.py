"""AdamW, by torch's fused kernel where the device has one."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from neox.ops import has_fast_path
from neox.optim.clipping import ClippedOptimizer, pieces


class AdamW(ClippedOptimizer, torch.optim.AdamW):
    """AdamW (arXiv:1711.05101), by torch's fused kernel where the device has one.

    That kernel divides gradients while it reads them. Elsewhere each operation is a kernel of its own.

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

    def keep(self, parameter: Tensor, states: dict[str, Tensor]) -> None:
        """Take over a parameter's saved states. The counter of steps goes to the device, where the kernel reads it."""
        super().keep(parameter, {name: state.to(parameter.device) for name, state in states.items()})

    def update(self, divisor: Tensor | None) -> None:
        """Update all parameters."""
        for group in self.param_groups:
            self._update_adamw(group, divisor)

    def _update_adamw(self, group: dict[str, Any], divisor: Tensor | None) -> None:
        """Update the parameters of a group, in one kernel if the device has it."""
        parameters: list[Tensor] = []
        grads: list[Tensor] = []
        means: list[Tensor] = []
        squares: list[Tensor] = []
        steps: list[Tensor] = []
        self._init_group(group, parameters, grads, means, squares, [], steps)
        if not parameters:
            return
        torch._foreach_add_(steps, 1)
        if not has_fast_path("fused_update", parameters[0].device):
            if divisor is not None:
                torch._foreach_div_(grads, divisor)
            for tensors in zip(parameters, grads, means, squares, steps, strict=True):
                _update_plainly(*tensors, group)
            return
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


def _update_plainly(
    parameter: Tensor, gradient: Tensor, mean: Tensor, square: Tensor, step: Tensor, group: dict[str, Any]
) -> None:
    """Update one parameter as torch's fused kernel does, a piece at a time, so that temporary tensors stay small.

    Args:
        parameter: The parameter.
        gradient: Its gradient, after clipping.
        mean: Mean of its gradients.
        square: Mean of their squares.
        step: Number of this update, on the device: the host waits for nothing.
        group: The parameter's group.
    """
    lr = group["lr"]
    beta1, beta2 = group["betas"]
    # 1 - beta ** step. In fp32 that difference would lose four digits in the first steps.
    correction1 = -torch.expm1(step * _log(beta1))
    correction2 = -torch.expm1(step * _log(beta2))
    for (p,), (g,), (m,), (v,) in pieces([parameter], [gradient.contiguous()], [mean], [square]):
        p.mul_(1.0 - lr * group["weight_decay"])
        m.lerp_(g, 1.0 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1.0 - beta2)
        divisor = (v / correction2).sqrt_().add_(group["eps"])
        p.addcdiv_(m / correction1, divisor, value=-lr)


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0.0 else -math.inf
