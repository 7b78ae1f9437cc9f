"""SM3."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from neox.optim.clipping import ClippedOptimizer


class SM3(ClippedOptimizer):
    """SM3-II (arXiv:1901.11150): Adagrad with one accumulator for each row and one for each column of a matrix.

    An element's sum of squares is at most the smaller of its two accumulators. Weights do not decay, as in gpt-neox.

    Args:
        groups: Parameter groups of `parameter_groups`.
        lr: Learning rate.
        momentum: Decay rate of an average of the steps; 0 keeps none.
        beta: Decay rate of the sums of squares; 0 sums without decay, as in the paper.
        eps: Number added under the root.
        clipping: Further arguments of `ClippedOptimizer`.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float = 0.0,
        momentum: float = 0.0,
        beta: float = 0.0,
        eps: float = 1e-30,
        **clipping: Any,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "beta": beta, "eps": eps}
        super().__init__(groups, defaults=defaults, **clipping)

    def update_group(self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]) -> None:
        """Update a group's parameters one by one, so that only one step is held at a time."""
        momentum = group["momentum"]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            step = self._direction(parameter, gradient, group)
            if momentum:
                average = self.states([parameter], "momentum_buffer")[0]
                step = average.mul_(momentum).add_(step, alpha=1.0 - momentum)
            parameter.add_(step, alpha=-group["lr"])

    def _direction(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        """Return the gradient over the root of its sums of squares, after adding its squares to the accumulators."""
        beta = group["beta"]
        accumulators = self._accumulators(parameter)
        bound = accumulators[0].expand_as(gradient).clone()
        for other in accumulators[1:]:
            torch.minimum(bound, other, out=bound)
        if beta:
            bound.mul_(beta)
        bound.addcmul_(gradient, gradient, value=1.0 - beta)
        for axis, accumulator in enumerate(accumulators):
            largest = bound
            other_axes = [i for i in range(bound.dim()) if i != axis]
            if other_axes:
                largest = bound.amax(other_axes, keepdim=True)
            if beta:
                largest = torch.maximum(accumulator, largest)
            accumulator.copy_(largest)
        return bound.add_(group["eps"]).rsqrt_().mul_(gradient)

    def _accumulators(self, parameter: Tensor) -> list[Tensor]:
        """Return one accumulator for each axis, which has one element for each index along it."""
        state = self.state[parameter]
        found = []
        for axis, length in enumerate(parameter.shape):
            name = f"accumulator_{axis}"
            if name not in state:
                shape = [1] * parameter.dim()
                shape[axis] = length
                state[name] = parameter.new_zeros(shape)
            found.append(state[name])
        return found
