"""Muon for hidden matrices, AdamW for the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from neox.optim.adamw import AdamW
from neox.optim.clipping import NormScope, WithoutDynamo, without_dynamo

_torch_step = without_dynamo(torch.optim.Muon.step)


class _Orthogonal(WithoutDynamo, torch.optim.Muon):
    """torch's Muon without momentum: its step is the orthogonal matrix nearest to the gradient, times a size."""


@dataclass(frozen=True)
class MatrixPart:
    """A part of a matrix in one of the optimizer's tensors.

    Attributes:
        shape: Shape of the matrix.
        first: First element of the flattened matrix that is here.
        length: Number of elements here; may be 0 if the matrix is shared.
        start: Position of the first element in the optimizer's tensor.
        group: Ranks that hold the other parts; None if all are here.
    """

    shape: tuple[int, ...]
    first: int
    length: int
    start: int
    group: dist.ProcessGroup | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """Return the view [length] of the part in the optimizer's tensor, or in one of the same shape."""
        return tensor.view(-1)[self.start : self.start + self.length]

    def whole(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Return the whole matrix on a device; all ranks of the group call it together."""
        if self.group is None:
            return self.of(tensor).view(self.shape).to(device)
        matrix = torch.zeros(self.shape, dtype=tensor.dtype, device=device)
        matrix.view(-1)[self.first : self.first + self.length].copy_(self.of(tensor))
        dist.all_reduce(matrix, group=self.group)  # of zeros elsewhere: exact
        return matrix


class Muon(AdamW):
    """Muon (arXiv:2502.16982) for groups marked `hidden`, AdamW for embeddings, head, norms and biases.

    Momentum is kept by element, so that a data rank needs it for its part of a matrix only. torch's Muon turns whole
    matrices to steps. Where ZeRO hands over flat tensors, a matrix that lies on several ranks is gathered for it.

    Args:
        groups: As in `ClippedOptimizer`, like `max_norm` and `scope`.
        max_norm: See there.
        scope: See there.
        lr: Learning rate of both.
        betas: AdamW's.
        eps: AdamW's.
        momentum: Decay rate of Muon's momentum.
        nesterov: Whether it is Nesterov's.
        hidden: Further arguments of `torch.optim.Muon`.

    Attributes:
        parts: Matrices in each flat tensor of hidden parameters; tensors that are not in it are matrices.
        device: Where matrices are multiplied; None: where the optimizer's tensors are.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        max_norm: float = 0.0,
        scope: NormScope | None = None,
        lr: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        momentum: float = 0.95,
        nesterov: bool = True,
        **hidden: Any,
    ) -> None:
        super().__init__(groups, max_norm=max_norm, scope=scope, lr=lr, betas=betas, eps=eps)
        self.parts: Mapping[Tensor, tuple[MatrixPart, ...]] = {}
        self.device: torch.device | None = None
        self._momentum, self._nesterov, self._hidden = momentum, nesterov, hidden

    def update(self, divisor: Tensor | None) -> None:
        """Update all parameters."""
        self.divide_gradients(divisor)
        for group in self.param_groups:
            if not group.get("hidden"):
                self._update_fused(group, None)
                continue
            for p in (p for p in group["params"] if p.grad is not None):
                self._update_hidden(p, group["lr"], group["weight_decay"])

    def _update_hidden(self, parameter: Tensor, lr: float, weight_decay: float) -> None:
        """Update a matrix, or a flat tensor of parts of matrices."""
        gradient, (momentum,) = parameter.grad, self.states([parameter], "momentum_buffer")
        assert gradient is not None
        momentum.lerp_(gradient, 1.0 - self._momentum)
        direction = gradient.lerp(momentum, self._momentum) if self._nesterov else momentum
        parameter.mul_(1.0 - lr * weight_decay)
        matrix = (MatrixPart(tuple(parameter.shape), 0, parameter.numel(), 0),) if parameter.dim() == 2 else ()
        for part in self.parts.get(parameter, matrix):
            whole = part.whole(direction, self.device or parameter.device)
            if part.length:
                step = self._orthogonal_step(whole, lr).view(-1)[part.first : part.first + part.length]
                part.of(parameter).add_(step.to(parameter.device))
        # Not used here, but torch's AdamW expects a counter in every state that it loads.
        self.state[parameter]["step"] = self.state[parameter].get("step", torch.zeros(())) + 1

    def _orthogonal_step(self, matrix: Tensor, lr: float) -> Tensor:
        """Return what torch's Muon adds to a matrix for such a momentum."""
        moved = torch.zeros_like(matrix)
        moved.grad = matrix
        _torch_step(_Orthogonal([moved], lr=lr, weight_decay=0.0, momentum=0.0, **self._hidden))
        return moved
