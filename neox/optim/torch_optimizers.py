"""torch's optimizers with clipping."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from neox.optim.clipping import ClippedOptimizer, without_dynamo

_sgd_step = without_dynamo(torch.optim.SGD.step)


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

    Arguments are those of `ClippedOptimizer` and of `torch.optim.Adafactor`. torch's own step reads two norms of each
    parameter on the host, which waits for an accelerator each time. Here they stay on the device.
    """

    def update_group(self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]) -> None:
        """Update a group's parameters by the formulas of `torch.optim.Adafactor`, under the names of its states."""
        self._init_group(group, [], [], [], [], [], [])
        lr = group["lr"]
        eps1, eps2 = group["eps"]
        for parameter, grad in zip(parameters, gradients, strict=True):
            state = self.state[parameter]
            least = torch.finfo(parameter.dtype).eps if eps1 is None else eps1
            state["step"] += 1  # in CPU memory
            step = state["step"].item()
            new_share = step ** group["beta2_decay"]
            size = parameter.norm(2) / parameter.numel() ** 0.5  # root of the mean square
            length = size.clamp(min=eps2) * min(lr, step**-0.5)
            if group["weight_decay"]:
                parameter.mul_(1 - lr * group["weight_decay"])

            if grad.dim() > 1:
                rows = state["row_var"]  # [..., I, 1]
                columns = state["col_var"]  # [..., 1, J]
                rows.lerp_(grad.norm(dim=-1, keepdim=True).square_().div_(grad.shape[-1]), new_share)
                columns.lerp_(grad.norm(dim=-2, keepdim=True).square_().div_(grad.shape[-2]), new_share)
                variance = rows @ columns
                variance.div_(rows.mean(dim=-2, keepdim=True).clamp_(min=least))
            else:
                variance = state["variance"].lerp_(grad * grad, new_share).clone()
            update = variance.clamp_(min=least * least).rsqrt_().mul_(grad)
            excess = update.norm(2) / (update.numel() ** 0.5 * group["d"])
            parameter.addcmul_(update, -length / excess.clamp(min=1.0))
