"""A forward pass of one more token over all slots of a key/value cache, with the same shapes and memory at every step.

The host knows nothing that changes from step to step. So one recorded CUDA graph, or one compiled program, serves all.

Legend: B batch, N heads of queries and K of keys here, T slots, D head dim.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from neox.model.cache import BlockState, KVCache, LayerCache, RingLayer, keys_and_values, tokens_in_slots
from neox.ops import explicit_attention, masked_bias


class CacheStep:
    """The steps after the prompt, with one token in each row; blocks use it instead of the cache.

    It writes to the cache's memory, and counts on the device only. The caller counts on the host (`KVCache.advance`)
    and checks that there is room.

    Attributes:
        slot: Index of the next token, [1].
        longest: Largest number of tokens that the caller will use.
        begun: Whether there are earlier tokens: always.
    """

    begun = True

    def __init__(self, cache: KVCache) -> None:
        """Continue behind what the cache holds now."""
        self.stores = tuple(cache.stores)
        self.states = dict(cache.states)
        self.start = cache.start
        self.longest = cache.longest
        self.slots = torch.arange(cache.max_length, device=cache.device)
        self.slot = torch.full((1,), cache.length, device=cache.device)

    def belongs_to(self, cache: KVCache) -> bool:
        """Return whether the cache still has the memory and the padding of this step."""
        memory = [store.pairs for store in self.stores]
        same = all(mine is store.pairs for mine, store in zip(memory, cache.stores, strict=True))
        same_states = all(tensors is cache.states[number] for number, tensors in self.states.items())
        return same and same_states and self.start is cache.start

    def keys(self, new_tokens: int) -> int:
        """Return the number of keys that queries are compared with: all slots."""
        return self.slots.numel()

    def positions(self, new_tokens: int) -> Tensor:
        """Return the position of the next token: [1], or [B, 1] for padded rows."""
        return self._positions(self.slot)

    def layers(self, new_tokens: int) -> list[StepLayer | BlockState]:
        """Return each block's part for a forward pass of one token."""
        assert new_tokens == 1
        by_number: dict[int, StepLayer | BlockState] = {}
        for number, tensors in self.states.items():
            by_number[number] = BlockState(tensors)  # padding stands before the prompt only
        for store in self.stores:
            slot = self.slot
            indices = self.slots
            if store.is_ring:
                slot = self.slot % store.slots
                indices = tokens_in_slots(self.slots[: store.slots], store.slots, self.slot)
            unseen = self._unseen(indices, store.pairs.dtype)
            positions = None
            if not store.is_ring:
                positions = self._positions(indices)
            for number, pairs in zip(store.blocks, store.pairs.unbind(0), strict=True):
                by_number[number] = StepLayer(pairs, slot, unseen, positions, store.value_width)
        return [by_number[number] for number in sorted(by_number)]

    def _unseen(self, indices: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the summand of scores with the tokens of these indices [T]: [B or 1, 1, 1, T]."""
        seen = (indices >= 0) & (indices <= self.slot)
        if self.start is not None:
            seen = seen & (indices >= self.start.unsqueeze(1))
        unseen = torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, -math.inf)
        return unseen.view(-1, 1, 1, seen.shape[-1])

    def advance(self, new_tokens: int) -> None:
        """Go on to the next slot, on the device."""
        self.slot.add_(new_tokens)

    def _positions(self, slots: Tensor) -> Tensor:
        if self.start is None:
            return slots
        return (slots - self.start.unsqueeze(1)).clamp(min=0)


class StepLayer(NamedTuple):
    """One layer's part of a `CacheStep`.

    Attributes:
        pairs: Keys and values of all slots, [B, K, 2, T, D], or only keys, [B, K, 1, T, D].
        slot: Index of the new token's slot, [1].
        unseen: Summand of scores: -inf for slots that are empty or padding, else 0, [B or 1, 1, 1, T].
        positions: Positions of all slots, [T] or [B, T]; None if they hold only a window, which the block sees whole.
        value_width: Number of leading dimensions of keys that are the values, too; 0 if values are next to keys.
    """

    pairs: Tensor
    slot: Tensor
    unseen: Tensor
    positions: Tensor | None
    value_width: int = 0

    @property
    def keys(self) -> Tensor:
        """All slots of keys, [B, K, T, D]."""
        return self.pairs[:, :, 0]

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        scale: float,
        pairs: Tensor | None = None,
        bias: Tensor | None = None,
        *,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Write k, v [B, 1, K, D] to the slot and attend over what is seen: q [B, 1, N, D] -> [B, 1, N, D].

        Args:
            q: Queries.
            k: New keys.
            v: New values; None if keys contain them.
            scale: Factor of the scores.
            pairs: Pairs that the kind of attention allows, bool [B or 1, N or 1, 1, T].
            bias: Summand of the scaled scores, [1, N, 1, T].
            softcap: Bound of the scaled scores; 0 for none.
            sinks: Scores [N] that take part in the softmax and add nothing.
        """
        batch, _, heads, width = q.shape
        groups = k.shape[2]
        new = k.unsqueeze(2) if v is None else torch.stack((k, v), dim=2)
        self.pairs.index_copy_(3, self.slot, new.permute(0, 3, 2, 1, 4))
        added = self.unseen if bias is None else self.unseen + bias
        added = masked_bias(added, pairs)
        if added.shape[1] > 1:  # one summand for each query's head
            added = added.reshape(added.shape[0], groups, heads // groups, added.shape[-1])
        # Query heads that share a key head become more queries of that head, which every kernel takes.
        grouped = q.reshape(batch, groups, heads // groups, width)
        keys, values = keys_and_values(self.pairs, self.value_width)
        if softcap or sinks is not None:
            sink_scores = None if sinks is None else sinks.view(groups, heads // groups, 1)
            out = explicit_attention(grouped, keys, values, scale=scale, mask=added, softcap=softcap, sinks=sink_scores)
        else:
            out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=added, scale=scale)
        return out.reshape(batch, 1, heads, -1)


CachedLayer = LayerCache | RingLayer | StepLayer
"""Keys and values of one block, as its attention uses them."""
