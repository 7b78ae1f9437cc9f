"""Head and cross entropy in one operation that never holds the logits of more than a chunk of tokens.

The forward pass computes the logits and the loss of a chunk, and at once its gradients. So nothing is computed twice,
and only tensors as large as the hidden states and the weight are kept (Liger-Kernel, arXiv:2410.10989). The tensor
ranks of a split head exchange two numbers per token.

Legend: R tokens, H hidden, V vocabulary, T tensor ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from neox.architecture import LOSS_CHUNK
from neox.ops import add_product, label_scores, linear, logits_gradient, softly_capped
from neox.parallel import ParallelGrid, gather_last_dim, gather_tensor_ranks, reduce_scatter_last_dim


class LossParts(NamedTuple):
    """A loss and its parts, scalars in fp32 that are equal on all tensor ranks.

    Attributes:
        trained: The sum of the parts, which has a gradient.
        cross_entropy: The cross entropy, without gradient.
        z_loss: The z-loss, without gradient.
    """

    trained: Tensor
    cross_entropy: Tensor
    z_loss: Tensor


def head_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    token_weights: Tensor,
    grid: ParallelGrid,
    *,
    bias: Tensor | None = None,
    row: bool = False,
    softcap: float = 0.0,
) -> Tensor:
    """Return the sum over tokens of token_weight x -log softmax(x W^T + b)[label] in fp32, equal on all tensor ranks.

    Products are in x's dtype, the softmax and all sums in fp32, gradients in the dtypes of their tensors. The gradient
    of x is this rank's summand (`copy_to_tensor_ranks` adds them up). There can be one backward pass, which scales in
    place.

    Args:
        x: Hidden states [R, H]; with `row`, this rank's part [R, H/T].
        weight: This rank's part of the head [V/T, H]; with `row`, [V, H/T].
        labels: Ids of the whole vocabulary [R].
        token_weights: Weights of the tokens [R]; they get no gradient.
        grid: Process groups.
        bias: This rank's part of the logits' bias [V/T].
        row: Whether the hidden dimension is split, and logits are summed over ranks.
        softcap: Bound c of the logits z, which become c tanh(z / c); 0 for none.
    """
    parts = head_loss_parts(
        x, weight, labels, token_weights, grid, bias=bias, row=row, softcap=softcap, z_coefficient=0.0
    )
    return parts.trained


def head_loss_parts(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    token_weights: Tensor,
    grid: ParallelGrid,
    *,
    bias: Tensor | None = None,
    row: bool = False,
    softcap: float = 0.0,
    z_coefficient: float,
) -> LossParts:
    """Return `head_cross_entropy` with a z-loss, which keeps logits from drifting (arXiv:2204.02311, section 5).

    The z-loss is the sum over tokens of token_weight x z_coefficient x log(sum of exp(logits))^2; there is none with a
    coefficient of 0. Other arguments are those of `head_cross_entropy`.
    """
    weights, largest = normalized_weights(token_weights)
    loss = _CrossEntropy(labels, weights, z_coefficient, grid)
    trained, parts = head_loss(x, weight, loss, largest, grid, bias=bias, row=row, softcap=softcap)
    return LossParts(trained, *parts.unbind())


@torch.no_grad()
def head_log_probs(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    grid: ParallelGrid,
    *,
    bias: Tensor | None = None,
    row: bool = False,
    softcap: float = 0.0,
) -> Tensor:
    """Return log softmax(x W^T + b)[label] in fp32, [R], equal on all tensor ranks; no gradient passes.

    Arguments as for `head_cross_entropy`.
    """
    result = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    labels = labels - _first_column(weight, grid, row=row)
    for here in _chunks(x, weight):
        logits = softly_capped(_logits(x[here], weight, bias, grid, row=row), softcap)
        log_sums, picked = _scores_over_ranks(logits, labels[here], grid)
        result[here] = picked - log_sums
        del logits  # before the logits of the next chunk are allocated
    return result


def vocab_parallel_cross_entropy(logits: Tensor, labels: Tensor, grid: ParallelGrid) -> Tensor:
    """Return -log softmax(logits)[label] per token in fp32, [B, S]; no gradient passes.

    Args:
        logits: Logits of this rank's part of the vocabulary [B, S, V/T], any dtype.
        labels: Ids of the whole vocabulary [B, S].
        grid: Process groups.
    """
    rows = logits.detach().flatten(0, -2)
    log_sums, picked = _scores_over_ranks(rows, labels.flatten() - grid.tp_rank * logits.shape[-1], grid)
    return (log_sums - picked).view(labels.shape)


def _scores_over_ranks(logits: Tensor, labels: Tensor, grid: ParallelGrid) -> tuple[Tensor, Tensor]:
    """Return `label_scores` of whole rows, for logits [R, V/T] and labels that count from this rank's first column."""
    log_sums, picked = label_scores(logits, labels)
    if grid.tp_size == 1:
        return log_sums, picked
    both = gather_tensor_ranks(torch.stack((log_sums, picked)), grid)  # [T, 2, R]
    return both[:, 0].logsumexp(0), both[:, 1].sum(0)


def _first_column(weight: Tensor, grid: ParallelGrid, *, row: bool) -> int:
    """Return the id that the first column of this rank's logits stands for."""
    columns = weight.shape[0]
    if row:
        columns //= grid.tp_size
    return grid.tp_rank * columns


def _chunks(x: Tensor, weight: Tensor) -> Iterator[slice]:
    """Yield the tokens whose logits are held at the same time."""
    largest = LOSS_CHUNK["cpu" if x.device.type == "cpu" else "accelerator"]
    rows = max(1, largest // weight.shape[0])
    for first in range(0, x.shape[0], rows):
        yield slice(first, first + rows)


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None, grid: ParallelGrid, *, row: bool) -> Tensor:
    """Return this rank's part of the logits of some tokens, [R, V/T]."""
    logits = linear(x, weight)
    if row:
        logits = reduce_scatter_last_dim(logits, grid)
    if bias is not None:
        logits += bias
    return logits


def _bounded(logits: Tensor, softcap: float) -> tuple[Tensor, Tensor | None]:
    """Softcap logits in place; return them and the derivative w.r.t. the original logits (None without a softcap)."""
    if softcap == 0.0:
        return logits, None
    ratio = logits.div_(softcap).tanh_()
    slope = ratio.square().neg_().add_(1.0)
    return ratio.mul_(softcap), slope


def _z_loss(log_sums: Tensor, weights: Tensor, coefficient: float) -> tuple[Tensor, Tensor]:
    """Return the z-loss of rows, and the factors of their softmax in the gradient of both losses, [R]."""
    loss = coefficient * (log_sums.square() * weights).sum()
    return loss, weights * (1.0 + 2.0 * coefficient * log_sums)


class ChunkLoss(Protocol):
    """Loss of a chunk of tokens, computed from its logits, with the gradient.

    Attributes:
        factors: Weight of each part in the trained loss.
    """

    @property
    def factors(self) -> tuple[float, ...]:
        """Return the factors."""
        ...

    def __call__(
        self, logits: Tensor, here: slice, first_column: int, *, needs_gradient: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the parts of the loss in fp32 [parts], and the gradient of the trained loss w.r.t. the logits.

        Args:
            logits: This rank's logits of the chunk [r, V/T]; may be overwritten.
            here: Range of the chunk's tokens among all tokens.
            first_column: Id of the first column's token.
            needs_gradient: Whether to compute the gradient.
        """


@dataclass(frozen=True)
class _CrossEntropy:
    """Cross entropy and z-loss, the `ChunkLoss` of `head_loss_parts`.

    Attributes:
        labels: Ids of the whole vocabulary [R].
        weights: Weights of the tokens [R].
        z_coefficient: Factor of the z-loss.
        grid: Process groups.
    """

    factors = (1.0, 1.0)

    labels: Tensor
    weights: Tensor
    z_coefficient: float
    grid: ParallelGrid

    def __call__(
        self, logits: Tensor, here: slice, first_column: int, *, needs_gradient: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return cross entropy and z-loss of a chunk, and the gradient of their sum."""
        labels = self.labels[here] - first_column
        weights = self.weights[here]
        log_sums, picked = _scores_over_ranks(logits, labels, self.grid)
        cross_entropy = ((log_sums - picked) * weights).sum()
        z_loss, softmax_weights = _z_loss(log_sums, weights, self.z_coefficient)
        gradient = None
        if needs_gradient:
            gradient = logits_gradient(logits, log_sums, labels, weights, softmax_weights)
        return torch.stack((cross_entropy, z_loss)), gradient


def normalized_weights(token_weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights of tokens divided by the largest weight in fp32, and the largest weight.

    The weights of a mean are tiny, and the loss scale is only applied in the backward pass. So in fp16 the gradients of
    single logits would underflow. Therefore the largest weight is multiplied in at the end.
    """
    weights = token_weights.float()
    tiny = torch.finfo(torch.float32).tiny
    if not weights.numel():  # a context rank may hold none of the tokens that count
        return weights, weights.new_tensor(tiny)
    largest = weights.abs().max().clamp(min=tiny)
    return weights / largest, largest


def head_loss(
    x: Tensor,
    weight: Tensor,
    loss: ChunkLoss,
    scale: Tensor,
    grid: ParallelGrid,
    *,
    bias: Tensor | None = None,
    row: bool = False,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return scale x loss of all tokens, which has a gradient, and its unweighted parts [parts].

    Args:
        x: As in `head_cross_entropy`.
        weight: As in `head_cross_entropy`.
        loss: The loss of a chunk.
        scale: Factor of the loss and its parts, a scalar.
        grid: Process groups.
        bias: As in `head_cross_entropy`.
        row: As in `head_cross_entropy`.
        softcap: As in `head_cross_entropy`.
    """
    if not torch.is_grad_enabled():  # inside a Function this is not visible, and gradients would be computed in vain
        x = x.detach()
        weight = weight.detach()
        if bias is not None:
            bias = bias.detach()
    trained, parts = _HeadLoss.apply(x, weight, bias, loss, scale, grid, row, softcap)
    return trained, parts


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        loss: ChunkLoss,
        scale: Tensor,
        grid: ParallelGrid,
        row: bool,
        softcap: float,
    ) -> tuple[Tensor, Tensor]:
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        needs_gradient = needs_x or needs_weight or needs_bias
        grad_x = torch.empty_like(x) if needs_x else None
        # Sums over chunks are fp32: bf16 would lose bits.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        grad_bias = None
        if bias is not None and needs_bias:
            grad_bias = torch.zeros_like(bias, dtype=torch.float32)
        total = torch.zeros(len(loss.factors), dtype=torch.float32, device=x.device)
        first_column = _first_column(weight, grid, row=row)
        for here in _chunks(x, weight):
            logits = _logits(x[here], weight, bias, grid, row=row)
            logits, slope = _bounded(logits, softcap)
            parts, grad = loss(logits, here, first_column, needs_gradient=needs_gradient)
            del logits  # here and below: the next chunk's tensors are allocated before the names are rebound
            total += parts
            if grad is None:
                continue
            if slope is not None:
                grad *= slope
            if grad_bias is not None:
                grad_bias += grad.sum(0, dtype=torch.float32)
            if row:
                grad = gather_last_dim(grad, grid)
            if grad_x is not None:
                grad_x[here] = linear(grad, weight.t())
            if grad_weight is not None:
                add_product(grad_weight, grad, x[here])
            del grad, slope
        ctx.gradients = (grad_x, grad_weight, grad_bias)
        ctx.scale = scale
        ctx.dtypes = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        total *= scale
        ctx.mark_non_differentiable(total)
        # Python numbers are arguments of the kernels; a tensor of them would be copied from the host, which waits.
        trained = torch.zeros((), dtype=torch.float32, device=x.device)
        for part, factor in zip(total.unbind(), loss.factors, strict=True):
            trained = trained + part * factor
        return trained, total

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        assert ctx.gradients is not None, "a second backward pass: the first one has used the gradients up"
        grad_x, grad_weight, grad_bias = ctx.gradients
        ctx.gradients = None
        scale = grad * ctx.scale
        type_x, type_weight, type_bias = ctx.dtypes
        grad_x = _scaled(grad_x, scale, type_x)
        grad_weight = _scaled(grad_weight, scale, type_weight)
        grad_bias = _scaled(grad_bias, scale, type_bias)
        return grad_x, grad_weight, grad_bias, None, None, None, None, None


def _scaled(part: Tensor | None, scale: Tensor, dtype: torch.dtype | None) -> Tensor | None:
    """Return part x scale in a dtype: in place, or in one pass if the dtype changes."""
    if part is None or dtype is None:
        return None
    if part.dtype == dtype:
        return part.mul_(scale)
    return torch.mul(part, scale, out=torch.empty_like(part, dtype=dtype))
