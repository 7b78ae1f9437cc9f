"""A transformer block: attention and MLP, with norms around them and a rule that adds them to the residual stream.

A recurrent mixer may take attention's place (`neox.model.mixer`); then a block may also be that mixer alone.

Legend: B batch, S sequence, H hidden.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from neox.architecture import BLOCKS, NORMS, RESIDUALS, Architecture
from neox.model.attention import SelfAttention
from neox.model.cache import CacheForm, StateForm
from neox.model.context import Aux, BlockContext
from neox.model.experts import ExpertMLP
from neox.model.mixer import Mixer
from neox.model.mlp import MLP
from neox.model.tiles import TokenTiles
from neox.ops import build_norm
from neox.parallel import ParallelGrid, Summand, TensorOptions, TokenShares

MLPS: Mapping[str, type[MLP | ExpertMLP]] = MappingProxyType({"dense": MLP, "experts": ExpertMLP})
"""Kind of MLP (`Architecture.mlp`) -> module."""

NormFunction = Callable[[Tensor], Tensor]


class BlockNorms(NamedTuple):
    """Norms of a block by their slots (`neox.architecture.NormSlots`); `identity` in those without one."""

    before_attention: NormFunction
    after_attention: NormFunction
    before_mlp: NormFunction
    after_mlp: NormFunction


def identity(x: Tensor) -> Tensor:
    """Return x. Unlike `nn.Identity`, it costs no time to speak of, which counts in generation."""
    return x


class Block(TokenShares):
    """A block of any kind: hidden states [B, S, H] and what is known of their tokens -> [B, S, H], and losses.

    With sequence parallelism the hidden states are this rank's share of the tokens.

    Attributes:
        attention: Its attention; None if it mixes tokens in another way.
        watch: Function of the output [B, S, H] that observes it; None for none.
    """

    attention: SelfAttention | None
    watch: Callable[[Tensor], None] | None = None

    @property
    def cache_form(self) -> CacheForm | StateForm | None:
        """What generation keeps of earlier tokens on this rank; None for nothing (`neox.architecture.BlockKind`)."""
        return None


class TransformerLayer(Block):
    """A block: hidden states [B, S, H] -> [B, S, H]; with sequence parallelism, this rank's share of the tokens.

    Args:
        architecture: The network.
        number: Number of the block, from 0.
        grid: Process groups.
        mixer: What mixes tokens: its attention, or a recurrent mixer in attention's place.
        hidden_dropout: Dropout probability of what is added to the residual stream.
        tile_size: Largest number of tokens of a sample that the MLP and norms compute at once; None for all.
        **options: Device and type of the parameters.
    """

    def __init__(
        self,
        architecture: Architecture,
        number: int,
        grid: ParallelGrid,
        *,
        mixer: SelfAttention | Mixer,
        hidden_dropout: float = 0.0,
        tile_size: int | None = None,
        **options: Unpack[TensorOptions],
    ) -> None:
        super().__init__()
        self.grid = grid
        self.tiles = TokenTiles(tile_size, grid)
        self.tiles_norms = NORMS[architecture.norm].by_steps  # others keep no more than their input
        self.hidden_dropout = hidden_dropout
        self.residual_multiplier = architecture.residual_multiplier
        kind = BLOCKS[architecture.attention[number]]
        slots, rule = RESIDUALS[kind.residual(architecture)]
        self.add_sublayers = RESIDUAL_RULES[rule]
        before_attention = self._norm(slots.before_attention, architecture, **options)
        self.attention: SelfAttention | None = None
        if isinstance(mixer, SelfAttention):
            self.attention = mixer
        else:
            self.mixer = mixer
        after_attention = self._norm(slots.after_attention, architecture, **options)
        before_mlp = self._norm(slots.before_mlp, architecture, **options)
        self.mlp = MLPS[architecture.mlp[number]](architecture, number, grid, **options)
        after_mlp = self._norm(slots.after_mlp, architecture, **options)
        self.norms = BlockNorms(before_attention, after_attention, before_mlp, after_mlp)

    @property
    def mixing(self) -> SelfAttention | Mixer:
        """Its attention, or the mixer in its place."""
        if self.attention is not None:
            return self.attention
        return self.mixer

    @property
    def cache_form(self) -> CacheForm | StateForm:
        """What attention keeps, or a mixer's state."""
        if self.attention is not None:
            return self.attention.cache_form
        return self.mixer.state_form

    def forward(self, x: Tensor, context: BlockContext) -> tuple[Tensor, Aux]:
        """Run the block by the network's residual rule. A slot without a norm does nothing.

        `parallel_one_norm` is like `parallel`, with one norm before both sublayers.

            sequential               parallel                  post_norm

                x ──────┐                x ─────┬──────┐           x ──────┐
                │       │                │      │      │           │       │
                │     norm               │    norm    norm         │   attention
                │   attention            │  attention  MLP         + ──────┘
                │     norm               │      │      │         norm
                + ──────┘                + ─────┴──────┘           │──────┐
                │──────┐                 │                         │      │
                │     norm                                         │     MLP
                │     MLP                                          + ─────┘
                │     norm                                       norm
                + ─────┘                                           │
                │

        Args:
            x: Hidden states [B, S, H].
            context: Positions, masks and cache.

        Returns:
            Hidden states [B, S, H], and the losses that the block adds to the objective's.
        """
        return self.add_sublayers(self, x, context)

    def normalise(self, norm: NormFunction, x: Tensor) -> Tensor:
        """Apply one of the block's norms to hidden states [B, S, H], in tiles if that saves memory."""
        if norm is identity or not self.tiles_norms:
            return norm(x)
        return self.tiles.run(norm, x, self.shares)

    def feed_forward(
        self, x: Tensor, context: BlockContext, before: NormFunction, after: NormFunction
    ) -> tuple[Tensor, Aux]:
        """Apply the MLP between two norms to hidden states [B, S, H]; return the output and auxiliary losses."""
        if not self.tiles.divide(x, self.shares):
            output, aux = self.mlp(before(x), context)
            return after(output), aux

        def compute_tile(tile: Tensor) -> Tensor:
            output, _ = self.mlp(before(tile), context)  # a dense MLP has no auxiliary losses
            return after(output)

        return self.tiles.run(compute_tile, x, self.shares), {}

    def contribution(self, x: Tensor) -> Tensor:
        """Apply the network's residual multiplier and dropout to a sublayer's output x."""
        return scaled_and_dropped(x, self.residual_multiplier, self.hidden_dropout, training=self.training)

    def parameters_on_shares(self) -> list[nn.Parameter]:
        """Return the norms' parameters.

        They are replicated on all tensor ranks, but each rank's gradient covers only its tokens, so it must be summed.
        """
        norms = [norm for norm in self.norms if isinstance(norm, nn.Module)]
        return [parameter for norm in norms for parameter in norm.parameters()]

    def reduces_once(self) -> bool:
        """Return whether attention and MLP of a parallel rule share one reduction over tensor ranks.

        False if sequence parallelism and hidden dropout are both on: each rank's dropout mask covers only its share of
        the tokens, and shares exist only after the reduction. False in tiles, each of which is reduced by itself.
        """
        if self.grid.tp_size == 1 or self.tiles.size is not None:
            return False
        dropout_differs_by_rank = self.shares > 1 and self.hidden_dropout > 0.0
        return not dropout_differs_by_rank

    def reduced_together(self, *summands: Summand) -> Tensor:
        """Return what several sublayers add to the residual stream, reduced over tensor ranks once.

        Each sublayer has one dropout mask for its output and its bias, which is the same on all tensor ranks. So the
        mask can be applied before the reduction.

        Args:
            *summands: This rank's part of each sublayer's output.
        """
        partials = []
        biases = []
        for partial, bias in summands:
            mask = None
            if self.training and self.hidden_dropout > 0.0:
                mask = F.dropout(torch.ones_like(partial), self.hidden_dropout)
            partials.append(partial if mask is None else partial * mask)
            if bias is not None:
                biases.append(bias if mask is None else bias * mask)
        total = functools.reduce(torch.add, partials)
        # Any row-parallel layer reduces in the same way: all-reduce, or reduce-scatter with sequence parallelism.
        reduced = self.mixing.dense.reduced(total)
        for bias in biases:
            reduced = reduced + bias
        if self.residual_multiplier != 1.0:
            reduced = reduced * self.residual_multiplier
        return reduced

    def _norm(self, name: str | None, architecture: Architecture, **options: Unpack[TensorOptions]) -> NormFunction:
        """Return the norm of a slot, which becomes a submodule of this name; the identity for None."""
        if name is None:
            return identity
        norm = build_norm(architecture, **options)
        self.add_module(name, norm)
        return norm


class MixerLayer(Block):
    """A block that is a recurrent mixer alone, x + mixer(norm(x)), as in Mamba: [B, S, H] -> [B, S, H].

    Args:
        architecture: The network.
        grid: Process groups.
        mixer: The mixer.
        hidden_dropout: Dropout probability of what is added to the residual stream.
        **options: Device and type of the parameters.
    """

    def __init__(
        self,
        architecture: Architecture,
        grid: ParallelGrid,
        *,
        mixer: Mixer,
        hidden_dropout: float = 0.0,
        **options: Unpack[TensorOptions],
    ) -> None:
        super().__init__()
        self.grid = grid
        self.attention = None
        self.hidden_dropout = hidden_dropout
        self.residual_multiplier = architecture.residual_multiplier
        self.norm = build_norm(architecture, **options)
        self.mixer = mixer

    @property
    def cache_form(self) -> StateForm:
        """The mixer's state."""
        return self.mixer.state_form

    def forward(self, x: Tensor, context: BlockContext) -> tuple[Tensor, Aux]:
        """Run the block: [B, S, H] -> [B, S, H]. It adds no losses to the objective's."""
        mixed = self.mixer(self.norm(x), context)
        added = scaled_and_dropped(mixed, self.residual_multiplier, self.hidden_dropout, training=self.training)
        return x + added, {}

    def parameters_on_shares(self) -> list[nn.Parameter]:
        """Return the norm's parameters."""
        return list(self.norm.parameters())


def scaled_and_dropped(x: Tensor, multiplier: float, dropout: float, *, training: bool) -> Tensor:
    """Return what a sublayer adds to the residual stream, for its output x."""
    if multiplier != 1.0:
        x = x * multiplier
    if training and dropout > 0.0:
        return F.dropout(x, dropout)
    return x


def _sequential(block: TransformerLayer, x: Tensor, context: BlockContext) -> tuple[Tensor, Aux]:
    """Add attention, then the MLP of that sum."""
    norms = block.norms
    attended = block.mixing(block.normalise(norms.before_attention, x), context)
    x = x + block.contribution(block.normalise(norms.after_attention, attended))
    output, aux = block.feed_forward(x, context, norms.before_mlp, norms.after_mlp)
    return x + block.contribution(output), aux


def _parallel(block: TransformerLayer, x: Tensor, context: BlockContext) -> tuple[Tensor, Aux]:
    """Add attention and MLP of the same hidden states, each with a norm of its own."""
    norms = block.norms
    normalised = block.normalise(norms.before_attention, x)
    if block.reduces_once():
        return _add_both_at_once(block, x, normalised, norms.before_mlp(x), context)
    attended = block.contribution(block.mixing(normalised, context))
    output, aux = block.feed_forward(x, context, norms.before_mlp, identity)
    return x + attended + block.contribution(output), aux


def _parallel_one_norm(block: TransformerLayer, x: Tensor, context: BlockContext) -> tuple[Tensor, Aux]:
    """Add attention and MLP of the same normalised hidden states."""
    normalised = block.normalise(block.norms.before_attention, x)
    if block.reduces_once():
        return _add_both_at_once(block, x, normalised, normalised, context)
    attended = block.contribution(block.mixing(normalised, context))
    output, aux = block.feed_forward(normalised, context, identity, identity)
    return x + attended + block.contribution(output), aux


def _add_both_at_once(
    block: TransformerLayer, x: Tensor, for_attention: Tensor, for_mlp: Tensor, context: BlockContext
) -> tuple[Tensor, Aux]:
    """Add the outputs of attention and MLP to the residual, with one reduction over tensor ranks for both."""
    attention_summand = block.mixing.summand(for_attention, context)
    mlp_summand, aux = block.mlp.summand(for_mlp, context)
    return x + block.reduced_together(attention_summand, mlp_summand), aux


def _post_norm(block: TransformerLayer, x: Tensor, context: BlockContext) -> tuple[Tensor, Aux]:
    """Normalise each sum, as BERT does."""
    norms = block.norms
    attended = block.mixing(norms.before_attention(x), context)
    x = block.normalise(norms.after_attention, x + block.contribution(attended))
    output, aux = block.feed_forward(x, context, norms.before_mlp, identity)
    return block.normalise(norms.after_mlp, x + block.contribution(output)), aux


ResidualRule = Callable[[TransformerLayer, Tensor, BlockContext], tuple[Tensor, Aux]]

RESIDUAL_RULES: Mapping[str, ResidualRule] = MappingProxyType(
    {
        "sequential": _sequential,
        "parallel": _parallel,
        "parallel_one_norm": _parallel_one_norm,
        "post_norm": _post_norm,
    }
)
"""Residual rules by name (`neox.architecture.RESIDUALS`)."""
