"""torch's optimizers with clipping."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from neox.optim.clipping import ClippedOptimizer, without_dynamo

_sgd_step = without_dynamo(torch.optim.SGD.step)
_adafactor_step = without_dynamo(torch.optim.Adafactor.step)


class SGD(ClippedOptimizer, torch.optim.SGD):
    """torch's stochastic gradient descent, which adds weight decay to the gradient.

    Arguments are those of `ClippedOptimizer` and of `torch.optim.SGD`. Parameters are updated one by one. torch's other
    way, which it chooses on a GPU, adds the weight decay to a copy of all gradients.
    """

    def __init__(self, groups: list[dict[str, Any]], **options: Any) -> None:
        super().__init__(groups, foreach=False, **options)

    def update(self, divisor: Tensor | None) -> None:
        """Update all parameters."""
        self.divide_gradients(divisor)
        _sgd_step(self)


class Adafactor(ClippedOptimizer, torch.optim.Adafactor):
    """torch's Adafactor (arXiv:1804.04235): means of squares of rows and columns, and steps relative to the weights.

    Arguments are those of `ClippedOptimizer` and of `torch.optim.Adafactor`.
    """

    def update(self, divisor: Tensor | None) -> None:
        """Update all parameters."""
        self.divide_gradients(divisor)
        _adafactor_step(self)
