"""Layers split over tensor ranks: linear by output features (column) or input features (row), and the embedding.

Legend: I input features, O output features, V vocabulary. Weights are [O, I] as in `nn.Linear`, held as this rank's
part; constructors leave them uninitialised (`neox.model` draws all weights). arXiv:1909.08053, section 3. Where tokens
are divided (`TokenShares`), what is replicated here is this rank's share: it is gathered before a product that splits
outputs, and what follows a product that splits inputs is summed and divided in one step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypedDict, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from neox.architecture import ParameterSpec
from neox.parallel.adapter import Adapter
from neox.parallel.collectives import (
    all_shares,
    reduce_over_tensor_ranks,
    reduce_scatter_tokens,
    start_gather,
    start_scattered_sum,
    start_sum,
    wait,
)
from neox.parallel.grid import ParallelGrid
from neox.parallel.token_shares import TokenShares

Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(x [..., I], weight [O, I], bias [O] or None) -> [..., O]: `F.linear`, or an equal of it."""


class TensorOptions(TypedDict, total=False):
    """Where parameters are made, and of which type: torch's defaults where left out."""

    device: torch.device | str | None
    dtype: torch.dtype | None


def mark_split(parameter: nn.Parameter, split: bool) -> nn.Parameter:
    """Mark whether a parameter is one of several tensor ranks' parts, and return it.

    DeepSpeed's gradient norm counts unmarked parameters on the first tensor rank only.
    """
    parameter.model_parallel = split  # type: ignore[attr-defined]
    return parameter


def mark_decay(parameter: nn.Parameter, decays: bool) -> nn.Parameter:
    """Mark whether weight decay applies to a parameter, and return it; without a mark it does to matrices."""
    parameter.decays = decays  # type: ignore[attr-defined]
    return parameter


def mark_hidden(parameter: nn.Parameter, hidden: bool) -> nn.Parameter:
    """Mark whether a parameter is a matrix between hidden states, and return it; without a mark it is not."""
    parameter.hidden = hidden  # type: ignore[attr-defined]
    return parameter


def mark_lr_factor(parameter: nn.Parameter, factor: float) -> nn.Parameter:
    """Mark a parameter with a factor of the learning rate, and return it; 1 without a mark."""
    parameter.lr_factor = factor  # type: ignore[attr-defined]
    return parameter


def shard_size(total: int, tp_size: int, what: str) -> int:
    """Return total / tp_size. Raises ValueError if it does not divide."""
    if total % tp_size:
        raise ValueError(f"{what} ({total}) is not divisible by the tensor-parallel degree ({tp_size})")
    return total // tp_size


def shard(full: Tensor, spec: ParameterSpec, tp_rank: int, tp_size: int) -> Tensor:
    """Return a tensor rank's part of a full parameter, as a view if there is one section.

    Replicated parameters are whole on every rank. `neox.checkpoint.reshard.merge` is the inverse.

    Raises:
        ValueError: If the split dimension does not divide by `tp_size`.
    """
    if spec.partition_dim is None or tp_size == 1:
        return full
    dim = spec.partition_dim
    parts = [full.narrow(dim, start, length) for start, length in spec.ranges(tp_rank, tp_size)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


class Summand(NamedTuple):
    """One rank's part of a sum over tensor ranks.

    Attributes:
        partial: This rank's summand [..., O].
        bias: Bias [O] that is added once, after the sum.
    """

    partial: Tensor
    bias: Tensor | None


class ColumnParallelLinear(TokenShares):
    """y = x W^T + b with the outputs split: [..., I] replicated -> [..., O/tp].

    Args:
        in_features: I.
        out_features: O, over all tensor ranks.
        grid: Process groups.
        bias: Whether there is a bias.
        multiply: Computes the product.
        **options: Device and type of the parameters.

    Attributes:
        products: What is computed instead in training with several tensor ranks: products of inputs, and of output
            gradients with weights or inputs. They need no gradient of their own.

    Raises:
        ValueError: O cannot be divided over the tensor ranks.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        grid: ParallelGrid,
        *,
        bias: bool = True,
        multiply: Multiply = F.linear,
        **options: Unpack[TensorOptions],
    ) -> None:
        super().__init__()
        self.grid, self.multiply, split = grid, multiply, grid.tp_size > 1
        self.products = (multiply, multiply)
        here = shard_size(out_features, grid.tp_size, "output features")
        self.weight = mark_split(nn.Parameter(torch.empty(here, in_features, **options)), split)
        self.bias = mark_split(nn.Parameter(torch.empty(here, **options)), split) if bias else None
        self.adapter: Adapter | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Multiply: [..., I] -> [..., O/tp]."""
        divided = self.shares > 1
        if divided or (self.grid.tp_size > 1 and torch.is_grad_enabled()):
            y = _ColumnLinear.apply(x, self.weight, self.bias, self.products, self.grid, divided)
        else:
            y = self.multiply(x, self.weight, self.bias)
        return y if self.adapter is None else y + self.adapter(x)

    def add_adapter(self, rank: int, scale: float, dropout: float) -> None:
        """Add a low-rank adapter, uninitialised."""
        self.adapter = Adapter(self.weight, self.grid, rank, scale, dropout, split_outputs=True)


class _ColumnLinear(torch.autograd.Function):
    """A product whose input gradient is summed over tensor ranks while the weight's gradient is computed.

    A divided input [B, S/tp, I] is kept as it is, and gathered again while its gradient is computed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        products: tuple[Multiply, Multiply],
        grid: ParallelGrid,
        divided: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        product, ctx.of_gradient = products
        ctx.grid, ctx.has_bias, ctx.divided = grid, bias is not None, divided
        if divided:
            x = all_shares(x, grid)
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        grad_x = grad_weight = grad_bias = None
        gathers, start = ctx.divided and ctx.needs_input_grad[1], start_scattered_sum if ctx.divided else start_sum
        # As rows: torch.compile would join this with the same in the forward pass, and keep its result.
        whole = start_gather(x.flatten(0, -2), ctx.grid) if gathers else x
        if ctx.needs_input_grad[0]:
            grad_x = start(ctx.of_gradient(rows, weight.t(), None), ctx.grid)
        if ctx.needs_input_grad[1]:
            whole = wait(whole) if gathers else whole
            grad_weight = ctx.of_gradient(rows.t(), whole.flatten(0, -2).t(), None)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            grad_bias = rows.sum(0)
        if grad_x is not None:
            grad_x = wait(grad_x).view(x.shape)
        return grad_x, grad_weight, grad_bias, None, None, None


class RowParallelLinear(TokenShares):
    """y = x W^T + b with the inputs split: [..., I/tp] -> [..., O] replicated.

    There is one bias, replicated and added once after the sum over ranks. (gpt-neox holds one per tensor rank under
    `gpt_j_residual`, whose sum is the model's bias.) Arguments as for `ColumnParallelLinear`, but I is divided.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        grid: ParallelGrid,
        *,
        bias: bool = True,
        multiply: Multiply = F.linear,
        **options: Unpack[TensorOptions],
    ) -> None:
        super().__init__()
        self.grid, self.multiply = grid, multiply
        here = shard_size(in_features, grid.tp_size, "input features")
        self.weight = mark_split(nn.Parameter(torch.empty(out_features, here, **options)), grid.tp_size > 1)
        self.bias = nn.Parameter(torch.empty(out_features, **options)) if bias else None
        self.adapter: Adapter | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Multiply and reduce: [..., I/tp] -> [..., O]."""
        if self.grid.tp_size == 1:
            y = self.multiply(x, self.weight, self.bias)
            return y if self.adapter is None else y + self.adapter(x)
        y = self.reduced(self.partial(x))
        return y if self.bias is None else y + self.bias

    def summand(self, x: Tensor) -> Summand:
        """Return this rank's part of what `forward` sums: the caller adds several and reduces them together."""
        return Summand(self.partial(x), self.bias)

    def reduced(self, partial: Tensor) -> Tensor:
        """Sum what `partial` returned over tensor ranks; where tokens are divided, the sum is of this rank's share."""
        return (reduce_scatter_tokens if self.shares > 1 else reduce_over_tensor_ranks)(partial, self.grid)

    def parameters_on_shares(self) -> tuple[nn.Parameter, ...]:
        """Return the bias, which is added after the sum."""
        return () if self.bias is None else (self.bias,)

    def partial(self, x: Tensor) -> Tensor:
        """Return this rank's summand [..., O], without the bias."""
        y = self.multiply(x, self.weight, None)
        return y if self.adapter is None else y + self.adapter(x)

    def add_adapter(self, rank: int, scale: float, dropout: float) -> None:
        """Add a low-rank adapter, uninitialised."""
        self.adapter = Adapter(self.weight, self.grid, rank, scale, dropout, split_outputs=False)


class VocabParallelEmbedding(nn.Module):
    """Token embedding with rows [V/tp, H] on each rank: tokens [B, S] -> [B, S, H] replicated.

    Args:
        num_embeddings: V, a multiple of the tensor-parallel degree.
        embedding_dim: H.
        grid: Process groups.
        **options: Device and type of the weight.
    """

    def __init__(
        self, num_embeddings: int, embedding_dim: int, grid: ParallelGrid, **options: Unpack[TensorOptions]
    ) -> None:
        super().__init__()
        self.grid = grid
        here = shard_size(num_embeddings, grid.tp_size, "vocabulary")
        self.first = grid.tp_rank * here
        self.weight = mark_split(nn.Parameter(torch.empty(here, embedding_dim, **options)), grid.tp_size > 1)

    def forward(self, tokens: Tensor) -> Tensor:
        """Look up: [B, S] -> [B, S, H]."""
        if self.grid.tp_size == 1:
            return F.embedding(tokens, self.weight)
        local = tokens - self.first
        elsewhere = (local < 0) | (local >= self.weight.shape[0])
        rows = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return reduce_over_tensor_ranks(rows.masked_fill(elsewhere.unsqueeze(-1), 0.0), self.grid)
