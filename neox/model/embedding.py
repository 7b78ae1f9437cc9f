"""Embedding, final norm and language-model head, which is tied to the embedding or has a weight of its own.

Legend: B batch, S sequence, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from neox.architecture import Architecture
from neox.model.cross_entropy import LossParts, head_log_probs, head_loss, head_loss_parts, normalized_weights
from neox.model.distillation import Direction, Distillation, TeacherLogits
from neox.model.positions import POSITIONS
from neox.ops import build_norm, linear, softly_capped
from neox.parallel import (
    ColumnParallelLinear,
    Multiply,
    ParallelGrid,
    RowParallelLinear,
    TensorOptions,
    TokenShares,
    VocabParallelEmbedding,
    copy_to_tensor_ranks,
    mark_split,
    reduce_scatter_last_dim,
    scatter_last_dim,
    scatter_tokens,
)


class LMHead(NamedTuple):
    """A network's head, tied or not, as a loss uses it.

    Attributes:
        grid: Process groups.
        weight: This rank's part of the weight, [V, H] split along V (or along H with `row`).
        logits: Function of hidden states [B, S, H] that returns logits [B, S, V/tp].
        bias: This rank's part of the logits' bias [V/tp], if they have one.
        row: Whether the hidden dimension is split.
        prepare: Function [..., H] -> [..., H] of hidden states before the product; None for none.
        sentences: Function of hidden states [B, S, H] that returns logits [B, 2] of whether the second sentence
            follows the first; None if the network has no such head.
        softcap: Bound of the logits (`neox.ops.softly_capped`); 0 for none.
    """

    grid: ParallelGrid
    weight: Tensor
    logits: Callable[[Tensor], Tensor]
    bias: Tensor | None = None
    row: bool = False
    prepare: Callable[[Tensor], Tensor] | None = None
    sentences: Callable[[Tensor], Tensor] | None = None
    softcap: float = 0.0

    def cross_entropy(self, hidden: Tensor, labels: Tensor, token_weights: Tensor) -> Tensor:
        """Return the sum of token_weight x cross entropy in fp32, without all logits at once; see `head_cross_entropy`.

        Args:
            hidden: Hidden states [B, S, H].
            labels: Ids of the vocabulary [B, S].
            token_weights: Weights of the tokens [B, S].
        """
        return self.loss_parts(hidden, labels, token_weights, z_coefficient=0.0).trained

    def loss_parts(self, hidden: Tensor, labels: Tensor, token_weights: Tensor, *, z_coefficient: float) -> LossParts:
        """Return `cross_entropy` with a z-loss; see `head_loss_parts`."""
        return head_loss_parts(
            self._input(hidden),
            self.weight,
            labels.flatten(),
            token_weights.flatten(),
            self.grid,
            bias=self.bias,
            row=self.row,
            softcap=self.softcap,
            z_coefficient=z_coefficient,
        )

    def distillation(
        self,
        hidden: Tensor,
        labels: Tensor,
        token_weights: Tensor,
        teacher: TeacherLogits,
        *,
        direction: Direction,
        temperature: float,
        share: float,
    ) -> tuple[Tensor, Tensor]:
        """Return the weighted sum of divergence and cross entropy, and both parts [2] (`neox.model.distillation`).

        Args:
            hidden: Hidden states [B, S, H].
            labels: Ids of the vocabulary [B, S].
            token_weights: Weights of the tokens [B, S].
            teacher: Logits of the teacher, [B, S, K] each.
            direction: Direction of the divergence.
            temperature: Temperature of both distributions.
            share: Weight w of the divergence; the cross entropy has the weight 1 - w.
        """
        weights, largest = normalized_weights(token_weights.flatten())
        flat = TeacherLogits(teacher.ids.flatten(0, 1), teacher.logits.flatten(0, 1))
        loss = Distillation(flat, labels.flatten(), weights, direction, temperature, share, self.grid)
        return head_loss(
            self._input(hidden),
            self.weight,
            loss,
            largest,
            self.grid,
            bias=self.bias,
            row=self.row,
            softcap=self.softcap,
        )

    def log_probs(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Return the log-probability of each label in fp32, without gradient; see `head_log_probs`.

        Args:
            hidden: Hidden states [..., H].
            labels: Ids of the vocabulary [...].
        """
        x = self._input(hidden)
        found = head_log_probs(
            x, self.weight, labels.flatten(), self.grid, bias=self.bias, row=self.row, softcap=self.softcap
        )
        return found.view(labels.shape)

    def _input(self, hidden: Tensor) -> Tensor:
        """Return the input of the product on this rank for hidden states [..., H]: [R, H], or [R, H/T] with `row`."""
        if self.prepare is not None:
            hidden = self.prepare(hidden)
        if self.row:
            hidden = scatter_last_dim(hidden, self.grid)
        else:
            hidden = copy_to_tensor_ranks(hidden, self.grid)
        return hidden.flatten(0, -2)


class Embedding(TokenShares):
    """Layer 0: tokens [B, S] -> [B, S, H], with vectors of positions and token types added; factors, norm, dropout.

    Attributes:
        multiply: Computes the product of a tied head.
    """

    def __init__(
        self,
        architecture: Architecture,
        padded_vocab_size: int,
        grid: ParallelGrid,
        *,
        dropout: float = 0.0,
        **options: Unpack[TensorOptions],
    ) -> None:
        super().__init__()
        self.grid = grid
        self.dropout = dropout
        self.multiplier = architecture.embedding_multiplier
        self.position_multiplier = architecture.position_multiplier
        self.logit_softcap = architecture.logit_softcap
        self.multiply: Multiply = linear
        self.word_embeddings = VocabParallelEmbedding(padded_vocab_size, architecture.hidden_size, grid, **options)
        self.position_embeddings: nn.Module | None = None
        self.tokentype_embeddings: nn.Embedding | None = None
        self.norm: nn.Module | None = None
        build_positions = POSITIONS[architecture.positions].embedding
        if build_positions is not None:
            self.position_embeddings = build_positions(architecture, **options)
        if architecture.token_types:
            self.tokentype_embeddings = nn.Embedding(architecture.token_types, architecture.hidden_size, **options)
        if architecture.embedding_norm:
            self.norm = build_norm(architecture, **options)

    def keep_words(self) -> None:
        """Drop all but the words' vectors: a copy of this layer on the stage of a tied head needs nothing else."""
        self.position_embeddings = None
        self.tokentype_embeddings = None
        self.norm = None

    def forward(self, tokens: Tensor, positions: Tensor | None = None, token_types: Tensor | None = None) -> Tensor:
        """Look up tokens [B, S] -> [B, S, H]; with sequence parallelism, this rank's share of the tokens.

        Args:
            tokens: Token ids [B, S].
            positions: Positions of the tokens, [S] or [B, S]; only read if the network has vectors of positions.
            token_types: Types of the tokens [B, S]; all 0 if None.
        """
        x = self.word_embeddings(tokens)
        if self.multiplier != 1.0:
            x = x * self.multiplier
        if self.position_embeddings is not None:
            vectors = self.position_embeddings(positions).to(x.dtype)
            if self.position_multiplier != 1.0:
                vectors = vectors * self.position_multiplier
            x = x + vectors
        if self.tokentype_embeddings is not None:
            types = torch.zeros_like(tokens) if token_types is None else token_types
            x = x + self.tokentype_embeddings(types)
        if self.norm is not None:
            x = self.norm(x)
        if self.shares > 1:
            x = scatter_tokens(x, self.grid)
        if self.training and self.dropout > 0.0:
            x = F.dropout(x, self.dropout)
        return x

    @property
    def head(self) -> LMHead:
        """The head of a network whose head is tied to this layer."""
        return LMHead(self.grid, self.word_embeddings.weight, self.logits, softcap=self.logit_softcap)

    def logits(self, x: Tensor) -> Tensor:
        """Multiply hidden states [B, S, H] by the words' vectors [V/tp, H] on this rank -> [B, S, V/tp]."""
        logits = self.multiply(copy_to_tensor_ranks(x, self.grid), self.word_embeddings.weight, None)
        return softly_capped(logits, self.logit_softcap)


class FinalNorm(nn.Module):
    """The norm after the last block, and the factor of the logits: [B, S, H] -> [B, S, H]."""

    def __init__(
        self,
        architecture: Architecture,
        **options: Unpack[TensorOptions],
    ) -> None:
        super().__init__()
        self.norm = build_norm(architecture, **options)
        self.multiplier = architecture.logit_multiplier

    def forward(self, x: Tensor) -> Tensor:
        """Normalise, and multiply by the factor of the logits."""
        x = self.norm(x)
        if self.multiplier != 1.0:
            x = x * self.multiplier
        return x


class Head(nn.Module):
    """An untied head: [B, S, H] -> logits [B, S, V/tp].

    Args:
        hidden_size: H.
        padded_vocab_size: V.
        grid: Process groups.
        parallelism: "column" splits the vocabulary. "row", NeoX v2.0's default, splits the hidden dimension: logits of
            the whole vocabulary are summed over ranks, which costs much communication, and each rank keeps its part.
        bias: Whether a bias is added to the logits.
        softcap: Bound of the logits; 0 for none.
        **options: Device and type of the weight.
    """

    def __init__(
        self,
        hidden_size: int,
        padded_vocab_size: int,
        grid: ParallelGrid,
        *,
        parallelism: Literal["row", "column"],
        bias: bool = False,
        softcap: float = 0.0,
        **options: Unpack[TensorOptions],
    ) -> None:
        super().__init__()
        self.grid = grid
        self.softcap = softcap
        self.final_linear: ColumnParallelLinear | RowParallelLinear
        if parallelism == "column":
            self.final_linear = ColumnParallelLinear(
                hidden_size, padded_vocab_size, grid, bias=bias, multiply=linear, **options
            )
            return
        self.final_linear = RowParallelLinear(
            hidden_size, padded_vocab_size, grid, bias=False, multiply=linear, **options
        )
        if bias:  # added after the logits are split
            here = torch.empty(padded_vocab_size // grid.tp_size, **options)
            self.final_linear.bias = mark_split(nn.Parameter(here), grid.tp_size > 1)

    @property
    def head(self) -> LMHead:
        """This layer as a loss uses it."""
        row = isinstance(self.final_linear, RowParallelLinear)
        return LMHead(self.grid, self.final_linear.weight, self, self.final_linear.bias, row, softcap=self.softcap)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of hidden states [B, S, H] -> [B, S, V/tp]."""
        if isinstance(self.final_linear, RowParallelLinear):
            partial = self.final_linear.partial(scatter_last_dim(x, self.grid))
            logits = reduce_scatter_last_dim(partial, self.grid)
            if self.final_linear.bias is not None:
                logits = logits + self.final_linear.bias
        else:
            logits = self.final_linear(x)
        return softly_capped(logits, self.softcap)
