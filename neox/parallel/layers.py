"""Layers that are split over tensor ranks (arXiv:1909.08053, section 3).

Linear layers are split by output features (column) or input features (row), the embedding by vocabulary. Each rank
holds its part of a weight [O, I]. Constructors leave weights uninitialised; `neox.model` draws them.

With sequence parallelism (`TokenShares`) each rank holds a share of the tokens. A column-parallel layer gathers the
shares before its product; a row-parallel layer sums and divides its results in one step.

Legend: I input features, O output features, V vocabulary.
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
"""(x [..., I], weight [O, I], bias [O] or None) -> [..., O]: `F.linear`, or another function with the same result."""


class TensorOptions(TypedDict, total=False):
    """Device and type of new parameters; torch's defaults for those left out."""

    device: torch.device | str | None
    dtype: torch.dtype | None


def mark_split(parameter: nn.Parameter, split: bool) -> nn.Parameter:
    """Mark whether a parameter is this tensor rank's part of a larger one, and return it.

    DeepSpeed's gradient norm counts unmarked parameters on the first tensor rank only.
    """
    parameter.model_parallel = split  # type: ignore[attr-defined]
    return parameter


def mark_decay(parameter: nn.Parameter, decays: bool) -> nn.Parameter:
    """Mark whether weight decay applies to a parameter, and return it. Without a mark it applies to matrices."""
    parameter.decays = decays  # type: ignore[attr-defined]
    return parameter


def mark_hidden(parameter: nn.Parameter, hidden: bool) -> nn.Parameter:
    """Mark whether a parameter is a matrix between hidden states, and return it. Without a mark it is not."""
    parameter.hidden = hidden  # type: ignore[attr-defined]
    return parameter


def mark_lr_factor(parameter: nn.Parameter, factor: float) -> nn.Parameter:
    """Mark a parameter with a factor of the learning rate, and return it. Without a mark the factor is 1."""
    parameter.lr_factor = factor  # type: ignore[attr-defined]
    return parameter


def mark_group(parameter: nn.Parameter, lr_factor: float, weight_decay: float | None) -> nn.Parameter:
    """Mark a parameter with what `parameter_groups` says of its updates, and return it.

    Args:
        parameter: The parameter.
        lr_factor: Factor of the learning rate, on top of that of `mark_lr_factor`.
        weight_decay: Weight decay; None for that of `mark_decay`.
    """
    parameter.group_lr_factor = lr_factor  # type: ignore[attr-defined]
    parameter.group_weight_decay = weight_decay  # type: ignore[attr-defined]
    return parameter


def shard_size(total: int, tp_size: int, what: str) -> int:
    """Return total / tp_size; ValueError if there is a remainder."""
    if total % tp_size:
        raise ValueError(f"{what} ({total}) is not divisible by the tensor-parallel degree ({tp_size})")
    return total // tp_size


def shard(full: Tensor, spec: ParameterSpec, tp_rank: int, tp_size: int) -> Tensor:
    """Return a tensor rank's part of a full parameter, as a view if there is one section.

    Replicated parameters are whole on every rank. `neox.checkpoint.weights.shards.merge` is the inverse.

    Raises:
        ValueError: If the split dimension is not divisible by `tp_size`.
    """
    if spec.partition_dim is None or tp_size == 1:
        return full
    dim = spec.partition_dim
    parts = [full.narrow(dim, start, length) for start, length in spec.ranges(tp_rank, tp_size)]
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, dim)


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
        in_features: Number of input features I.
        out_features: Number of output features O over all tensor ranks.
        grid: Process groups.
        bias: Whether there is a bias.
        multiply: Function that computes the product.
        **options: Device and type of the parameters.

    Attributes:
        products: Functions that replace `multiply` in training with several tensor ranks. The first multiplies inputs
            and weights, the second the gradient of the output and one of these. They record no gradient.

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
        self.grid = grid
        self.multiply = multiply
        self.products = (multiply, multiply)
        split = grid.tp_size > 1
        here = shard_size(out_features, grid.tp_size, "output features")
        self.weight = mark_split(nn.Parameter(torch.empty(here, in_features, **options)), split)
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = mark_split(nn.Parameter(torch.empty(here, **options)), split)
        self.adapter: Adapter | None = None

    @property
    def adapted_weight(self) -> Tensor:
        """The weight [O/tp, I] with the adapter's product, for other formulas of the same layer in generation."""
        if self.adapter is None:
            return self.weight
        return self.adapter.merged_into(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply: [..., I] -> [..., O/tp]."""
        divided = self.shares > 1
        if divided or (self.grid.tp_size > 1 and torch.is_grad_enabled()):
            y = _ColumnLinear.apply(x, self.weight, self.bias, self.products, self.grid, divided)
        else:
            y = self.multiply(x, self.weight, self.bias)
        return _with_adapter(y, x, self.adapter)

    def add_adapter(self, rank: int, scale: float, dropout: float) -> None:
        """Add a low-rank adapter, uninitialised."""
        self.adapter = Adapter(self.weight, self.grid, rank, scale, dropout, split="outputs")


class WholeLinear(TokenShares):
    """y = x W^T that every tensor rank computes whole: [..., I] -> [..., O]. Its gradient is the same on every rank.

    With sequence parallelism input and output are this rank's share of the tokens. Arguments are those of
    `ColumnParallelLinear`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        grid: ParallelGrid,
        *,
        multiply: Multiply = F.linear,
        **options: Unpack[TensorOptions],
    ) -> None:
        super().__init__()
        self.grid = grid
        self.multiply = multiply
        self.weight = nn.Parameter(torch.empty(out_features, in_features, **options))
        self.adapter: Adapter | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Multiply: [..., I] -> [..., O]."""
        return _with_adapter(self.multiply(x, self.weight, None), x, self.adapter)

    def parameters_on_shares(self) -> tuple[nn.Parameter, ...]:
        """Return the weight. The adapter returns its own parameters."""
        return (self.weight,)

    def add_adapter(self, rank: int, scale: float, dropout: float) -> None:
        """Add a low-rank adapter, uninitialised."""
        self.adapter = Adapter(self.weight, self.grid, rank, scale, dropout, split="nothing")


class _ColumnLinear(torch.autograd.Function):
    """A product whose input gradient is summed over tensor ranks while the gradient of the weight is computed.

    With sequence parallelism only this rank's share of the input [B, S/tp, I] is kept. The shares are gathered again
    while the input's gradient is computed.
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
        # A frozen weight has no gradient, which alone needs the input.
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.shape = x.shape
        product, ctx.of_gradient = products
        ctx.grid = grid
        ctx.has_bias = bias is not None
        ctx.divided = divided
        if divided:
            x = all_shares(x, grid)
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        rows = grad.flatten(0, -2)
        grad_x = None
        grad_weight = None
        grad_bias = None
        gathers = ctx.divided and needs_weight
        whole = x
        if gathers:
            # As rows: otherwise torch.compile joins this with the gathering of the forward pass, and keeps its result.
            whole = start_gather(x.flatten(0, -2), ctx.grid)
        if needs_x:
            start = start_scattered_sum if ctx.divided else start_sum
            grad_x = start(ctx.of_gradient(rows, weight.t(), None), ctx.grid)
        if needs_weight:
            if gathers:
                whole = wait(whole)
            grad_weight = ctx.of_gradient(rows.t(), whole.flatten(0, -2).t(), None)
        if ctx.has_bias and needs_bias:
            grad_bias = rows.sum(0)
        if grad_x is not None:
            grad_x = wait(grad_x).view(ctx.shape)
        return grad_x, grad_weight, grad_bias, None, None, None


class RowParallelLinear(TokenShares):
    """y = x W^T + b with the inputs split: [..., I/tp] -> [..., O] replicated.

    All ranks hold the same bias, which is added once, after the sum over ranks. (gpt-neox's tensor ranks hold summands
    of it with `gpt_j_residual`.) Arguments are those of `ColumnParallelLinear`, but I is divided.
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
        self.grid = grid
        self.multiply = multiply
        here = shard_size(in_features, grid.tp_size, "input features")
        self.weight = mark_split(nn.Parameter(torch.empty(out_features, here, **options)), grid.tp_size > 1)
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, **options))
        self.adapter: Adapter | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Multiply and reduce: [..., I/tp] -> [..., O]."""
        if self.grid.tp_size == 1:
            y = self.multiply(x, self.weight, self.bias)
            return _with_adapter(y, x, self.adapter)
        y = self.reduced(self.partial(x))
        if self.bias is not None:
            y = y + self.bias
        return y

    def summand(self, x: Tensor) -> Summand:
        """Return this rank's part of what `forward` sums: the caller adds several and reduces them together."""
        return Summand(self.partial(x), self.bias)

    def reduced(self, partial: Tensor) -> Tensor:
        """Sum results of `partial` over tensor ranks; with sequence parallelism, return this rank's share."""
        if self.shares > 1:
            return reduce_scatter_tokens(partial, self.grid)
        return reduce_over_tensor_ranks(partial, self.grid)

    def parameters_on_shares(self) -> tuple[nn.Parameter, ...]:
        """Return the bias, which is added after the sum."""
        if self.bias is None:
            return ()
        return (self.bias,)

    def partial(self, x: Tensor) -> Tensor:
        """Return this rank's summand [..., O], without the bias."""
        y = self.multiply(x, self.weight, None)
        return _with_adapter(y, x, self.adapter)

    def add_adapter(self, rank: int, scale: float, dropout: float) -> None:
        """Add a low-rank adapter, uninitialised."""
        self.adapter = Adapter(self.weight, self.grid, rank, scale, dropout, split="inputs")


def _with_adapter(y: Tensor, x: Tensor, adapter: Adapter | None) -> Tensor:
    """Return a layer's output y with that of its adapter for the input x, if it has one."""
    if adapter is None:
        return y
    return y + adapter(x)


class VocabParallelEmbedding(nn.Module):
    """Token embedding with rows [V/tp, H] on each rank: tokens [B, S] -> [B, S, H] replicated.

    Args:
        num_embeddings: Size of the vocabulary V, a multiple of the tensor-parallel degree.
        embedding_dim: Hidden size H.
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
