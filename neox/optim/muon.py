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
class MatrixShards:
    """How tensor ranks divide a matrix.

    Attributes:
        dim: Dimension that they divide: 0 rows, 1 columns.
        rank: Number of this rank.
        size: Number of ranks.
        group: The ranks.
    """

    dim: int
    rank: int
    size: int
    group: dist.ProcessGroup

    def joined(self, shard: Tensor) -> Tensor:
        """Return the matrix of all shards; all ranks call it together."""
        shards = [torch.empty_like(shard) for _ in range(self.size)]
        dist.all_gather(shards, shard.contiguous(), group=self.group)
        return torch.cat(shards, self.dim)

    def own(self, matrix: Tensor) -> Tensor:
        """Return this rank's shard of a matrix."""
        return matrix.chunk(self.size, self.dim)[self.rank].contiguous()


@dataclass(frozen=True)
class MatrixPart:
    """A part of a matrix, or of this tensor rank's shard of it, in one of the optimizer's tensors.

    Attributes:
        shape: Shape of the matrix or shard.
        first: First element of the flattened matrix that is here.
        length: Number of elements here; may be 0 if the matrix is shared.
        start: Position of the first element in the optimizer's tensor.
        turns: Number of heads whose queries, keys and values take turns in the rows, so that there are three matrices
            [heads, 3, width, columns]; 0 for one.
        group: Data ranks that hold the other parts; None if all are here.
        shards: How tensor ranks divide the matrix; None if each has all of it.
    """

    shape: tuple[int, ...]
    first: int
    length: int
    start: int
    turns: int = 0
    group: dist.ProcessGroup | None = None
    shards: MatrixShards | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """Return the view [length] of the part in the optimizer's tensor, or in one of the same shape."""
        return tensor.view(-1)[self.start : self.start + self.length]

    def whole(self, part: Tensor, device: torch.device) -> Tensor:
        """Return the whole matrix of its part [length] on a device; all ranks of the group call it together."""
        if self.group is None:
            return part.view(self.shape).to(device)
        matrix = torch.zeros(self.shape, dtype=part.dtype, device=device)
        matrix.view(-1)[self.first : self.first + self.length].copy_(part)
        dist.all_reduce(matrix, group=self.group)  # of zeros elsewhere: exact
        return matrix


class Muon(AdamW):
    """Muon (arXiv:2502.16982) for groups marked `hidden`, AdamW for embeddings, head, norms and biases.

    Momentum is kept by element, so that a data rank needs it only for its part of a matrix. torch's Muon turns whole
    matrices into steps. A matrix that tensor ranks divide is gathered for that, and one that lies on several data
    ranks because ZeRO hands over flat tensors. Each expert is a matrix, and so are queries, keys, values, and the
    halves of a gated MLP.

    Args:
        groups: Parameter groups of `parameter_groups`.
        lr: Learning rate of both.
        betas: Decay rates of AdamW's moments.
        eps: Number added to AdamW's denominator.
        momentum: Decay rate of Muon's momentum.
        nesterov: Whether Muon's momentum is Nesterov's.
        split_fused: Whether queries, keys and values, and the halves of gated MLPs, are matrices of their own. Who sets
            `parts` reads it.
        max_norm: Norm above which gradients are scaled down to it; 0 never clips.
        scope: Ranks and parameters of the norm.
        hidden: Further arguments of `torch.optim.Muon`.

    Attributes:
        parts: Parts of matrices in each tensor of hidden parameters; tensors that are not in it are matrices.
        device: Device that multiplies matrices; None for the device of the optimizer's tensors.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        momentum: float = 0.95,
        nesterov: bool = True,
        split_fused: bool = True,
        max_norm: float = 0.0,
        scope: NormScope | None = None,
        **hidden: Any,
    ) -> None:
        super().__init__(groups, lr=lr, betas=betas, eps=eps, max_norm=max_norm, scope=scope)
        self.parts: Mapping[Tensor, tuple[MatrixPart, ...]] = {}
        self.device: torch.device | None = None
        self.split_fused = split_fused
        self._momentum = momentum
        self._nesterov = nesterov
        self._hidden = hidden

    def update(self, divisor: Tensor | None) -> None:
        """Update all parameters."""
        self.divide_gradients(divisor)
        for group in self.param_groups:
            if not group.get("hidden"):
                self._update_adamw(group, None)
                continue
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update_hidden(parameter, parameter.grad, group["lr"], group["weight_decay"])

    def _update_hidden(self, parameter: Tensor, gradient: Tensor, lr: float, weight_decay: float) -> None:
        """Update a matrix, or a flat tensor of parts of matrices."""
        momentum = self.states([parameter], "momentum_buffer")[0]
        momentum.lerp_(gradient, 1.0 - self._momentum)
        parameter.mul_(1.0 - lr * weight_decay)
        for part in self._parts_of(parameter):
            direction = part.of(momentum)
            if self._nesterov:
                direction = part.of(gradient).lerp(direction, self._momentum)
            whole = part.whole(direction, self.device or parameter.device)
            if part.length:
                step = self._step_of_part(part, whole, lr).view(-1)[part.first : part.first + part.length]
                part.of(parameter).add_(step.to(parameter.device))
        # Not used here, but torch's AdamW expects a counter in every state that it loads.
        self.state[parameter]["step"] = self.state[parameter].get("step", torch.zeros(())) + 1

    def _parts_of(self, parameter: Tensor) -> tuple[MatrixPart, ...]:
        """Return the parts of matrices in a tensor of hidden parameters."""
        if parameter in self.parts:
            return self.parts[parameter]
        if parameter.dim() == 2:
            return (MatrixPart(tuple(parameter.shape), first=0, length=parameter.numel(), start=0),)
        return ()

    def _step_of_part(self, part: MatrixPart, whole: Tensor, lr: float) -> Tensor:
        """Return the step of a whole matrix or shard, or of the three whose rows take turns in it."""
        turns = part.turns
        if part.shards is not None:
            whole = part.shards.joined(whole)
            turns *= part.shards.size
        step = self._step_of_whole(whole, turns, lr)
        if part.shards is not None:
            return part.shards.own(step)
        return step

    def _step_of_whole(self, whole: Tensor, turns: int, lr: float) -> Tensor:
        if not turns:
            return self._orthogonal_step(whole, lr)
        by_kind = whole.view(turns, 3, -1, whole.shape[1]).transpose(0, 1)  # [3, heads, width, columns]
        steps = [self._orthogonal_step(matrix.flatten(0, 1), lr).view_as(matrix) for matrix in by_kind]
        return torch.stack(steps, dim=1).view_as(whole)

    def _orthogonal_step(self, matrix: Tensor, lr: float) -> Tensor:
        """Return what torch's Muon adds to a matrix for such a momentum."""
        moved = torch.zeros_like(matrix)
        moved.grad = matrix
        _torch_step(_Orthogonal([moved], lr=lr, weight_decay=0.0, momentum=0.0, **self._hidden))
        return moved
