"""SM3."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from neox.optim.clipping import ClippedOptimizer, NormScope


class SM3(ClippedOptimizer):
    """SM3-II (arXiv:1901.11150): Adagrad with one accumulator for each row and one for each column of a matrix.

    An element's sum of squares is at most the smaller of its two accumulators. Weights do not decay, as in gpt-neox.

    Args:
        groups: As in `ClippedOptimizer`, like `max_norm` and `scope`.
        max_norm: See there.
        scope: See there.
        lr: Learning rate.
        momentum: Decay rate of an average of the steps; 0 keeps none.
        beta: Decay rate of the sums of squares; 0 sums without decay, as in the paper.
        eps: Added under the root.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        max_norm: float = 0.0,
        scope: NormScope | None = None,
        lr: float = 0.0,
        momentum: float = 0.0,
        beta: float = 0.0,
        eps: float = 1e-30,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "beta": beta, "eps": eps}
        super().__init__(groups, max_norm=max_norm, scope=scope, defaults=defaults)

    def update_group(self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]) -> None:
        """Update a group's parameters."""
        for p, gradient in zip(parameters, gradients, strict=True):  # whose steps need not be held together
            step = self._direction(p, gradient, group)
            if group["momentum"]:
                (average,) = self.states([p], "momentum_buffer")
                step = average.mul_(group["momentum"]).add_(step, alpha=1.0 - group["momentum"])
            p.add_(step, alpha=-group["lr"])

    def _direction(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        """Return the gradient over the root of its sums of squares, after adding its squares to the accumulators."""
        beta, sums = group["beta"], self._accumulators(parameter)
        bound = sums[0].expand_as(gradient).clone()
        for other in sums[1:]:
            torch.minimum(bound, other, out=bound)
        if beta:
            bound.mul_(beta)
        bound.addcmul_(gradient, gradient, value=1.0 - beta)
        for axis, accumulator in enumerate(sums):
            others = [i for i in range(bound.dim()) if i != axis]
            largest = bound.amax(others, keepdim=True) if others else bound
            accumulator.copy_(torch.maximum(accumulator, largest) if beta else largest)
        return bound.add_(group["eps"]).rsqrt_().mul_(gradient)

    def _accumulators(self, parameter: Tensor) -> list[Tensor]:
        """Return one accumulator for each axis, which has one element for each index along it."""
        state, ndim = self.state[parameter], parameter.dim()
        for axis, length in enumerate(parameter.shape):
            if (name := f"accumulator_{axis}") not in state:
                state[name] = parameter.new_zeros([length if i == axis else 1 for i in range(ndim)])
        return [state[f"accumulator_{axis}"] for axis in range(ndim)]
