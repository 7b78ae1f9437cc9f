"""One transformer block, attention and MLP around a residual stream, and a run through several.

Legend: B batch, S sequence, H hidden, W inner width of the MLP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from neox.architecture import ACTIVATIONS as ACTIVATIONS_ON_PAPER
from neox.architecture import BLOCK_NORMS, Architecture
from neox.model.attention import ATTENTION
from neox.model.cache import KVCache
from neox.model.cache_step import CachedLayer, CacheStep
from neox.model.gmlp import GatedMLPLayer
from neox.model.positions import Tables
from neox.ops import ACTIVATIONS, NORMS, AttentionImpl, linear, same_document_pairs, unpadded_keys
from neox.parallel import (
    ColumnParallelLinear,
    ParallelGrid,
    RowParallelLinear,
    TensorOptions,
    TokenShares,
    gather_tokens,
)


class MLP(nn.Module):
    """H -> W -> H with an activation between; W is split over tensor ranks."""

    def __init__(
        self,
        architecture: Architecture,
        grid: ParallelGrid,
        **options: Unpack[TensorOptions],
    ) -> None:
        super().__init__()
        hidden, width, name = architecture.hidden_size, architecture.mlp_width, architecture.activation
        self.activation = ACTIVATIONS[name]
        inner_width, bias = width * ACTIVATIONS_ON_PAPER[name].width_factor, architecture.mlp_bias
        self.dense_h_to_4h = ColumnParallelLinear(hidden, inner_width, grid, bias=bias, multiply=linear, **options)
        self.dense_4h_to_h = RowParallelLinear(width, hidden, grid, bias=bias, multiply=linear, **options)

    def forward(self, x: Tensor) -> Tensor:
        """Return the inner activations, before the output projection `dense_4h_to_h`: [B, S, H] -> [B, S, W/tp]."""
        return self.activation(self.dense_h_to_4h(x))


class TransformerLayer(TokenShares):
    """A block: hidden states [B, S, H] -> [B, S, H], by `Architecture.residual`; a parallel one needs one all-reduce.

    Where tokens are divided, hidden states are this rank's share of them.

    Args:
        architecture: The network.
        number: Of the block, from 0.
        grid: Process groups.
        impl: Attention kernel.
        attention_dropout: Of attention weights.
        hidden_dropout: Of what is added to the residual.
        layer_scaling: Divide scores by the block's number and multiply in the softmax (`SelfAttention`).
        **options: Device and type of the parameters.

    Attributes:
        kept_inputs: Context in which the input of a block that is recomputed whole is kept.
        recomputed_whole: Whether `run_blocks` may compute all of the block again in the backward pass.
        is_last: Whether the block is the network's last one, after which divided tokens are joined.
    """

    kept_inputs: Callable[[], AbstractContextManager[Any]] = nullcontext
    recomputed_whole = is_last = False
    input_layernorm: nn.Module
    post_attention_layernorm: nn.Module
    post_feedforward_layernorm: nn.Module

    def __init__(
        self,
        architecture: Architecture,
        number: int,
        grid: ParallelGrid,
        *,
        impl: AttentionImpl,
        attention_dropout: float = 0.0,
        hidden_dropout: float = 0.0,
        layer_scaling: bool = False,
        **options: Unpack[TensorOptions],
    ) -> None:
        super().__init__()
        self.grid = grid
        self.residual, self.parallel_residual = architecture.residual, architecture.parallel_residual
        self.hidden_dropout = hidden_dropout
        before, between, after = BLOCK_NORMS[architecture.residual]
        self._add_norms(before, architecture, **options)
        self.attention = ATTENTION[architecture.attention[number]](
            architecture,
            number,
            grid,
            impl=impl,
            dropout=attention_dropout,
            layer_scaling=layer_scaling,
            **options,
        )
        self._add_norms(between, architecture, **options)
        self.mlp = MLP(architecture, grid, **options)
        self._add_norms(after, architecture, **options)

    def forward(
        self,
        x: Tensor,
        tables: Tables | None = None,
        cache: CachedLayer | None = None,
        visible: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Run the block: [B, S, H] -> [B, S, H]; arguments as `SelfAttention.forward` takes them."""
        attention, mlp, p = self.attention, self.mlp, self.hidden_dropout
        if self.residual == "post_norm":
            attended = attention.dense(attention(x, tables, cache, visible, positions))
            x = self.post_attention_layernorm(x + F.dropout(attended, p, self.training))
            return self.post_feedforward_layernorm(x + F.dropout(mlp.dense_4h_to_h(mlp(x)), p, self.training))
        if self.residual == "sublayer_output_norm":
            attended = attention.dense(attention(x, tables, cache, visible, positions))
            x = x + F.dropout(self.post_attention_layernorm(attended), p, self.training)
            return x + F.dropout(self.post_feedforward_layernorm(mlp.dense_4h_to_h(mlp(x))), p, self.training)
        normalised = self.input_layernorm(x)
        attended = attention(normalised, tables, cache, visible, positions)
        if self.parallel_residual:
            if self.residual == "parallel":
                normalised = self.post_attention_layernorm(x)
            drops_shares = self.shares > 1 and p > 0.0  # masks are of a share of the sum then
            if self.grid.tp_size > 1 and not drops_shares:
                return x + self._reduced_together(attended, mlp(normalised))
            attended = F.dropout(attention.dense(attended), p, self.training)
            return x + attended + F.dropout(mlp.dense_4h_to_h(mlp(normalised)), p, self.training)
        x = x + F.dropout(attention.dense(attended), p, self.training)
        return x + F.dropout(mlp.dense_4h_to_h(mlp(self.post_attention_layernorm(x))), p, self.training)

    def parameters_on_shares(self) -> list[nn.Parameter]:
        """Return the norms' parameters."""
        norms = (module for module in self.children() if module is not self.attention and module is not self.mlp)
        return [parameter for norm in norms for parameter in norm.parameters()]

    def _add_norms(self, names: Sequence[str], architecture: Architecture, **options: Unpack[TensorOptions]) -> None:
        for name in names:
            self.add_module(name, build_norm(architecture, **options))

    def _reduced_together(self, attended: Tensor, inner: Tensor) -> Tensor:
        """Return the sum of both output projections with one all-reduce for both tensor-parallel partial results.

        Dropout multiplies each summand by the mask of their sum, which is drawn alike on all ranks.
        """
        partials, biases = [], []
        for projection, x in ((self.attention.dense, attended), (self.mlp.dense_4h_to_h, inner)):
            partial = projection.partial(x)
            bias: Tensor | None = projection.bias
            if self.training and self.hidden_dropout > 0.0:
                mask = F.dropout(torch.ones_like(partial), self.hidden_dropout)
                partial, bias = partial * mask, None if bias is None else bias * mask
            partials.append(partial)
            if bias is not None:
                biases.append(bias)
        reduced = self.mlp.dense_4h_to_h.reduced(partials[0] + partials[1])
        return reduced + sum(biases) if biases else reduced


Block = TransformerLayer | GatedMLPLayer


def build_norm(architecture: Architecture, **options: Unpack[TensorOptions]) -> nn.Module:
    """Return one of the network's norms over hidden states."""
    return NORMS[architecture.norm](architecture.hidden_size, eps=architecture.norm_epsilon, **options)


def token_positions(
    x: Tensor,
    cache: KVCache | CacheStep | None = None,
    document_starts: Tensor | None = None,
    *,
    prompt: int = 0,
    shares: int = 1,
) -> Tensor:
    """Return the positions of tokens or hidden states [B, S, ...]: [S], or [B, S] where rows differ.

    Args:
        x: Tokens or hidden states, or a share of them [B, S / shares, ...].
        cache: Tokens seen before, after which positions go on.
        document_starts: Where each token's document, in which positions start from 0, starts in its row, [B, S].
        prompt: Vectors of a soft prompt in the cache, which are not counted.
        shares: Parts into which tokens are divided over tensor ranks.
    """
    assert cache is None or document_starts is None, "documents are kept apart in training and scoring alone"
    if cache is not None:
        positions = cache.positions(x.shape[1])
        return (positions - prompt).clamp_(min=0) if prompt and cache.begun else positions
    slots = torch.arange(x.shape[1] * shares, device=x.device)
    return slots if document_starts is None else slots - document_starts


def run_blocks(
    blocks: Sequence[Block],
    x: Tensor,
    cache: KVCache | CacheStep | None = None,
    document_starts: Tensor | None = None,
    recompute: int = 0,
    lengths: Tensor | None = None,
) -> Tensor:
    """Run neighbouring blocks: hidden states [B, S, H] -> [B, S, H]. Training, scoring and generation all do.

    Args:
        blocks: In order.
        x: Hidden states; where blocks divide tokens, this rank's share of them, which the network's last block joins.
        cache: Tokens seen before; these are appended.
        document_starts: Where each token's document starts in its row, [B, S]; attention and positions then stay within
            documents. Not with a cache.
        recompute: Recompute so many blocks at a time in the backward pass, of those that are recomputed whole; 0
            keeps all activations.
        lengths: Tokens of each sample that are no padding, [B], for a bidirectional network; all if None.
    """
    if not blocks:
        return x
    shares = blocks[0].shares
    length = x.shape[1] * shares
    visible = None if document_starts is None else same_document_pairs(document_starts)
    visible = visible if lengths is None else unpadded_keys(lengths, length)
    keys = length if cache is None else cache.keys(length)
    slots = cache.slot if isinstance(cache, CacheStep) else None
    positions = token_positions(x, cache, document_starts, shares=shares)
    attention = next((block.attention for block in blocks if isinstance(block, TransformerLayer)), None)
    tables = None if attention is None else attention.position_tables(positions, keys, x.dtype, slots)
    if cache is not None:
        for block, part in zip(blocks, cache.layers(length), strict=True):
            x = block(x, tables, part, None, positions)
        cache.advance(length)
        return x
    for together, chunk in _chunks(blocks, recompute):

        def run(x: Tensor, chunk: Sequence[Block] = chunk) -> Tensor:
            for block in chunk:
                x = block(x, tables, None, visible, positions)
            return x

        x = _recomputed(run, x, chunk[0]) if together else run(x)
    return gather_tokens(x, blocks[-1].grid) if shares > 1 and blocks[-1].is_last else x


def _recomputed(run: Callable[[Tensor], Tensor], x: Tensor, first: Block) -> Tensor:
    """Run blocks whose activations are computed again in the backward pass; the first says how their input is kept."""
    with first.kept_inputs():
        result: Tensor = first.grid.rng.checkpoint(run, x)
    return result


def _chunks(blocks: Sequence[Block], size: int) -> Iterator[tuple[bool, Sequence[Block]]]:
    """Yield whether blocks are recomputed together, and which: at most `size` of those that are, the others between."""
    first = 0
    while first < len(blocks):
        together = size > 0 and blocks[first].recomputed_whole
        most, stop = (size if together else len(blocks)), first + 1
        while stop < len(blocks) and stop - first < most and (size > 0 and blocks[stop].recomputed_whole) == together:
            stop += 1
        yield together, blocks[first:stop]
        first = stop
