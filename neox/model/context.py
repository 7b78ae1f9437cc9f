"""Values that a forward pass takes next to the hidden states, and the losses that blocks return next to them.

Legend: B batch, S sequence, T keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from neox.model.cache import BlockState, KVCache
from neox.model.cache_step import CachedLayer, CacheStep
from neox.model.positions import Tables


@dataclass(frozen=True)
class Context:
    """Everything that a forward pass needs to know about its tokens.

    Attributes:
        cache: Keys and values of earlier tokens, to which these are appended; None in training and scoring.
        document_starts: Index in the row at which each token's document starts, [B, S]. Attention and positions then
            stay within documents. Not together with a cache.
        token_types: Types of the tokens of a bidirectional network, [B, S]; all 0 if None.
        divided: Whether the tokens are those of this context rank (`context_indices`), in training.
        lengths: Number of tokens of each row before its padding, [B]; None if there is none. A bidirectional network
            does not attend to padding, and experts do not count it. Nothing else in a causal network sees it.
    """

    cache: KVCache | CacheStep | None = None
    document_starts: Tensor | None = None
    token_types: Tensor | None = None
    lengths: Tensor | None = None
    divided: bool = False

    def __post_init__(self) -> None:
        assert self.cache is None or self.document_starts is None, "documents are kept apart without a cache only"

    @property
    def begins(self) -> bool:
        """Whether the first of these tokens is the first of its sequence."""
        return self.cache is None or not self.cache.begun

    @property
    def first_slots(self) -> Tensor | None:
        """Index of the first token of each row that is padded on the left, [B]; None without such padding."""
        if self.cache is None:
            return None
        return self.cache.start


class BlockContext(NamedTuple):
    """What one block needs next to its hidden states; `Stage` makes it from a `Context`.

    Attributes:
        positions: Positions of the tokens, [S], or [B, S] if rows differ.
        tables: What position encodings computed from them (`PositionEncoding.tables`), by `SelfAttention.tables_key`.
        document_starts: Index in the row at which each token's document starts, [B, S]; None for one document a row.
            With context ranks, S counts the tokens of all of them.
        divided: Whether the hidden states are those of this context rank's tokens.
        block_masks: Pairs of each kind of attention by block, by `SelfAttention.pairs_name`, for the kernel of GPUs.
        visible: Keys that are not padding, in a bidirectional network, bool [B, 1, 1, S]; all if None.
        is_text: Tokens that are not padding, of all tensor ranks, bool [B, S]; all if None. Experts read it.
        cache: This block's keys and values of earlier tokens, in generation.
        state: This block's state of earlier tokens, in generation, if it keeps one instead.
        routes: Number of a block -> experts of its tokens, kept from the forward pass for its recomputation. A block
            whose experts are here is computed again.
        observes: Whether `observe_scores` is called. Compiled blocks notice that a flag has changed, but not that a
            function has become None.
        observe_scores: Function of an attention module, its queries [B, S, N, D] and keys [B, S, K, D] that observes
            them.
    """

    positions: Tensor
    tables: Mapping[str, Tables] = MappingProxyType({})
    document_starts: Tensor | None = None
    divided: bool = False
    block_masks: Mapping[str, BlockMask] = MappingProxyType({})
    visible: Tensor | None = None
    is_text: Tensor | None = None
    cache: CachedLayer | None = None
    state: BlockState | None = None
    routes: dict[int, Tensor] | None = None
    observes: bool = False
    observe_scores: Callable[[Any, Tensor, Tensor], None] | None = None


Aux = Mapping[str, Tensor]
"""Losses that blocks add to the objective's, by name: fp32 scalars, already multiplied by their coefficients. Numbers
that are only reported stand next to them, without a gradient: numbers of choices of experts, and `CHOICES`, by which
they are divided in the end. All names are known from the architecture (`neox.architecture.block_losses` and
`block_statistics`)."""


def add_aux(first: Aux, second: Aux) -> Aux:
    """Return the losses of two parts of the network; equal names are summed."""
    if not first:
        return second
    total = dict(first)
    for name, value in second.items():
        if name in total:
            value = total[name] + value
        total[name] = value
    return total
