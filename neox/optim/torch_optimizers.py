"""torch's optimizers with clipping."""

from __future__ import annotations

import torch
from torch import Tensor

from neox.optim.clipping import ClippedOptimizer, without_dynamo

_sgd_step = without_dynamo(torch.optim.SGD.step)


class SGD(ClippedOptimizer, torch.optim.SGD):
    """torch's stochastic gradient descent, which adds weight decay to the gradient.

    Arguments are those of `ClippedOptimizer` and of `torch.optim.SGD`.
    """

    def update(self, divisor: Tensor | None) -> None:
        """Update all parameters."""
        self.divide_gradients(divisor)
        _sgd_step(self)
