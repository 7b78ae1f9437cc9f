"""What generation keeps of earlier tokens, preallocated: keys and values of each, or a state of fixed size.

A step with one new token, of index 4, reads and writes this in one row:

    view of a block    memory of the row                      writes             reads
    ---------------    -----------------------------------    ---------------    --------------------------------
    LayerCache         a slot for each token:    0 1 2 3 _ _  slot 4             slots 0 to 4
    RingLayer          slots of a window of 3:   3 1 2        slot 4 % 3 = 1     all three: tokens 3, 4 and 2
    StepLayer          the memory of either                   the same slot      all slots, empty ones at -inf
    BlockState         tensors of fixed size                  all of them        all of them

`StepLayer` is that of `CacheStep`, whose steps have the same shapes each time.

Legend: L layers, B batch, N heads of queries and K of keys here, T slots, S new tokens, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from neox.architecture import Architecture, generates_by_steps
from neox.errors import NeoXError
from neox.ops import (
    VisiblePairs,
    attention_by_chunks,
    blocked_attention,
    dot_product_attention,
    explicit_attention,
    masked_bias,
    window_rule,
)


class CacheForm(NamedTuple):
    """Shape of one block's cache of keys and values on this rank.

    Each kind of attention says its own in `cache_form`; a block with a window keeps only the tokens in it. `slots` and
    `shape` alone turn it into the size of tensors.

    Attributes:
        tokens: Largest number of tokens that it has to hold, such as a window's; None for all.
        heads: Number of key and value heads.
        width: Width of a head's keys.
        value_width: Number of leading dimensions of the keys that are also the values; 0 if values are stored
            separately and are as wide as keys.
    """

    tokens: int | None
    heads: int
    width: int
    value_width: int = 0

    def slots(self, max_length: int) -> int:
        """Return T, the number of tokens that are kept of at most `max_length`."""
        if self.tokens is None:
            return max_length
        return min(self.tokens, max_length)

    def shape(self, blocks: int, batch: int, max_length: int) -> tuple[int, ...]:
        """Return the shape of the memory of some blocks, [L, B, K, 2, T, D], or [L, B, K, 1, T, D] for only keys."""
        kept = 1 if self.value_width else 2
        return blocks, batch, self.heads, kept, self.slots(max_length), self.width


class StateForm(NamedTuple):
    """Shapes of one sequence's state of a block on this rank, which is fp32: it adds up over all tokens."""

    shapes: tuple[tuple[int, ...], ...]


class BlockState(NamedTuple):
    """One block's state of earlier tokens during one forward pass.

    Attributes:
        tensors: Tensors of the block's `StateForm`, [B, ...] each, 0 before the first token. The block writes the state
            after the new tokens to the same memory.
        is_text: New tokens that count, bool [B, S]; padding on the left leaves the state as it is. None if all count.
    """

    tensors: tuple[Tensor, ...]
    is_text: Tensor | None = None


class SlotStore(NamedTuple):
    """Memory of all blocks of a cache that have the same `CacheForm`.

    Attributes:
        blocks: Numbers of the blocks on this rank.
        pairs: Their keys and values, [L, B, K, 2, T, D], or only keys, [L, B, K, 1, T, D].
        value_width: `CacheForm.value_width` of the blocks.
        is_ring: Whether a token goes to the slot of its index modulo T, in place of the token that leaves the window.
            Otherwise it goes to the slot of its index.
    """

    blocks: tuple[int, ...]
    pairs: Tensor
    value_width: int
    is_ring: bool

    @property
    def slots(self) -> int:
        """Number of slots, T."""
        return self.pairs.shape[4]


class KVCache:
    """Keys and values of all blocks on this rank, of blocks with a window those of the window only, and states.

    `reset` makes it ready for other prompts without new memory.

    Args:
        architecture: The network.
        forms: What each block on this rank keeps; never None if the network generates by steps.
        batch: Number of sequences.
        max_length: Most tokens of a sequence, without a soft prompt.
        device: Device of the cache.
        dtype: Type of keys and values.

    Attributes:
        stores: The memory of keys, one tensor for all blocks that have the same form.
        states: Number of a block that keeps a state -> its tensors, [B, ...] each.
        batch: Number of sequences.
        device: Device of the cache.
        max_length: Most tokens of a sequence, T.
        longest: Largest number of tokens that the caller will use, at most T. It is the sequence length for rotary
            scalings whose frequencies depend on the length.
        length: Number of tokens that were read.
        start: Index of the first token of each row, [B], if rows are padded on the left; positions count from there.
            None if all rows begin at 0.
    """

    def __init__(
        self,
        architecture: Architecture,
        forms: Sequence[CacheForm | StateForm | None],
        batch: int,
        max_length: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if not generates_by_steps(architecture):
            raise NeoXError(
                "this network has no keys and values to keep, because it is bidirectional, or because blocks keep "
                f"nothing of earlier tokens ({', '.join(dict.fromkeys(architecture.attention))}): generate with the "
                "whole sequence computed at each step, as the runner does for such a network"
            )
        self.max_length = max_length + architecture.soft_prompt_tokens
        self.longest = self.max_length
        self.states: dict[int, tuple[Tensor, ...]] = {}
        blocks_of: dict[CacheForm, list[int]] = {}
        for number, form in enumerate(forms):
            assert form is not None, "the network generates by steps"
            if isinstance(form, StateForm):
                self.states[number] = tuple(torch.zeros((batch, *shape), device=device) for shape in form.shapes)
                continue
            blocks_of.setdefault(form, []).append(number)
        self.stores: list[SlotStore] = []
        for form, blocks in blocks_of.items():
            pairs = torch.zeros(form.shape(len(blocks), batch, self.max_length), device=device, dtype=dtype)
            is_ring = form.slots(self.max_length) < self.max_length
            self.stores.append(SlotStore(tuple(blocks), pairs, form.value_width, is_ring))
        self.batch = batch
        self.device = torch.device(device or "cpu")
        self.length = 0
        self.start: Tensor | None = None

    def reset(self, start: Tensor | None = None) -> None:
        """Forget all tokens."""
        self.length = 0
        self.start = start
        for tensors in self.states.values():
            for tensor in tensors:
                tensor.zero_()

    @property
    def begun(self) -> bool:
        """Whether it holds tokens."""
        return self.length > 0

    def keys(self, new_tokens: int) -> int:
        """Return the number of keys that new tokens are compared with, their own included."""
        return self.length + new_tokens

    def positions(self, new_tokens: int) -> Tensor:
        """Return the positions of the next tokens: [S], or [B, S] for padded rows (0 in the padding)."""
        return self._positions(torch.arange(self.length, self.length + new_tokens, device=self.device))

    def layers(self, new_tokens: int) -> list[LayerCache | RingLayer | BlockState]:
        """Return each block's view for a forward pass of `new_tokens`.

        Raises:
            NeoXError: If they do not fit.
        """
        self.check_room(new_tokens)
        by_number: dict[int, LayerCache | RingLayer | BlockState] = {}
        is_text = None
        if self.states and self.start is not None:
            is_text = torch.arange(self.length, self.length + new_tokens, device=self.device) >= self.start.unsqueeze(1)
        for number, tensors in self.states.items():
            by_number[number] = BlockState(tensors, is_text)
        for store in self.stores:
            views: Sequence[LayerCache | RingLayer]
            if store.is_ring:
                views = [RingLayer(pairs, self.length, self.start) for pairs in store.pairs.unbind(0)]
            else:
                views = self._whole_layers(store, new_tokens)
            by_number.update(zip(store.blocks, views, strict=True))
        return [by_number[number] for number in sorted(by_number)]

    def _whole_layers(self, store: SlotStore, new_tokens: int) -> list[LayerCache]:
        """Return the views of blocks that keep all tokens."""
        end = self.keys(new_tokens)
        mask, causal = self._mask(new_tokens)
        positions = self._positions(torch.arange(end, device=self.device))
        # Views of all layers at once: layer by layer they would cost a fifth of a small model's step.
        new = store.pairs.narrow(4, self.length, new_tokens).unbind(0)
        keys, values = keys_and_values(store.pairs.narrow(4, 0, end), store.value_width)
        return [
            LayerCache(n, k, v, mask, causal, positions)
            for n, k, v in zip(new, keys.unbind(0), values.unbind(0), strict=True)
        ]

    def check_room(self, new_tokens: int) -> None:
        """Raise NeoXError if new tokens do not fit."""
        if self.keys(new_tokens) > self.max_length:
            raise NeoXError(
                f"the KV cache has room for {self.max_length} tokens; {self.length} are in it and {new_tokens} more "
                "do not fit: make max_length larger"
            )

    def reorder(self, rows: Tensor) -> None:
        """Keep these rows [B'] in this order, as beam search does; a row may be kept several times."""
        for number, store in enumerate(self.stores):
            filled = min(self.length, store.slots)
            kept = store.pairs[:, rows, ..., :filled, :]
            pairs = store.pairs
            if len(rows) != self.batch:  # new memory only if their number changes
                pairs = pairs.new_zeros(pairs.shape[0], len(rows), *pairs.shape[2:])
            pairs[..., :filled, :] = kept
            self.stores[number] = store._replace(pairs=pairs)
        for number, tensors in self.states.items():
            kept_states = tuple(tensor[rows] for tensor in tensors)
            if len(rows) != self.batch:
                self.states[number] = kept_states
                continue
            for tensor, kept in zip(tensors, kept_states, strict=True):
                tensor.copy_(kept)
        self.batch = len(rows)
        if self.start is not None:
            self.start = self.start[rows]

    def advance(self, new_tokens: int) -> None:
        """Count `new_tokens` as read; called once after all layers have appended."""
        self.length += new_tokens

    def _positions(self, slots: Tensor) -> Tensor:
        """Return the positions of the tokens with these indices."""
        if self.start is None:
            return slots
        return (slots - self.start.unsqueeze(1)).clamp_(min=0)

    def _mask(self, new_tokens: int) -> tuple[Tensor | None, bool]:
        """Return a mask, bool [B or 1, 1, S, length + S] or None, and whether plain causality has to be added."""
        if self.start is None and (new_tokens == 1 or self.length == 0):
            return None, new_tokens > 1
        slots = torch.arange(self.length + new_tokens, device=self.device)
        allowed = slots.unsqueeze(0) <= slots[self.length :].unsqueeze(1)  # [S, length + S]
        if self.start is None:
            return allowed[None, None], False
        seen = slots.unsqueeze(0) >= self.start.unsqueeze(1)  # [B, length + S]
        # Padding attends to itself: a row of the softmax with nothing in it would be NaN.
        itself = slots.unsqueeze(0) == slots[self.length :].unsqueeze(1)
        return ((allowed & seen.unsqueeze(1)) | itself).unsqueeze(1), False


def keys_and_values(pairs: Tensor, value_width: int) -> tuple[Tensor, Tensor]:
    """Return views of keys and values [..., T, D] of a part [..., 2 or 1, T, D] of a store."""
    if value_width:
        keys = pairs.squeeze(-3)
        return keys, keys[..., :value_width]
    keys, values = pairs.unbind(-3)
    return keys, values


class LayerCache(NamedTuple):
    """One layer's part of a KVCache during one forward pass.

    Attributes:
        new: View [B, K, 2 or 1, S, D] of the slots of the new tokens.
        keys: View [B, K, length + S, D] of all keys, those of the new tokens included.
        values: View [B, K, length + S, D] of all values.
        mask: Pairs (query, key) that see each other, bool [B or 1, 1, S, length + S]; all (earlier) ones if None.
        causal: Whether queries see earlier keys only, if there is no mask.
        positions: Positions of the keys, [length + S] or [B, length + S].
    """

    new: Tensor
    keys: Tensor
    values: Tensor
    mask: Tensor | None
    causal: bool
    positions: Tensor

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
        """Append k, v [B, S, K, D] and attend over everything seen: q [B, S, N, D] -> [B, S, N, D].

        Args:
            q: Queries.
            k: New keys.
            v: New values; None if keys contain them.
            scale: Factor of the scores.
            pairs: Pairs that the kind of attention allows, bool [B or 1, N or 1, S, length + S], causal.
            bias: Summand of the scaled scores, [1, N, S, length + S], with -inf for later keys.
            softcap: Bound of the scaled scores; 0 for none.
            sinks: Scores [N] that take part in the softmax and add nothing.
        """
        mask = self.mask
        if pairs is not None:
            mask = pairs if mask is None else mask & pairs
        if bias is not None:
            mask = masked_bias(bias, mask)
        self.new[:, :, 0] = k.transpose(1, 2)
        if v is not None:
            self.new[:, :, 1] = v.transpose(1, 2)
        if softcap or sinks is not None:
            if mask is None and self.causal:
                pairs_of_prompt = torch.ones(q.shape[1], self.keys.shape[2], dtype=torch.bool, device=q.device)
                mask = pairs_of_prompt.tril()
            sink_scores = None if sinks is None else sinks.view(-1, 1, 1)
            out = explicit_attention(
                q.transpose(1, 2), self.keys, self.values, scale=scale, mask=mask, softcap=softcap, sinks=sink_scores
            )
            return out.transpose(1, 2)
        causal = self.causal and mask is None
        out = dot_product_attention(q.transpose(1, 2), self.keys, self.values, mask, scale, causal=causal)
        return out.transpose(1, 2)


class RingLayer(NamedTuple):
    """One layer's part of a KVCache that keeps a window of T tokens: the token of index i is in slot i modulo T.

    Attributes:
        pairs: Keys and values of the window, [B, K, 2, T, D].
        length: Number of earlier tokens.
        start: Index of the first token of each row, [B]; None if all rows begin at 0.
        positions: None: the slots hold only a window, which the block sees whole.
    """

    pairs: Tensor
    length: int
    start: Tensor | None
    positions: None = None

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
        """Append k, v [B, S, K, D] and attend over the window: q [B, S, N, D] -> [B, S, N, D].

        Args:
            q: Queries.
            k: New keys.
            v: New values. Blocks whose keys contain them have no window.
            scale: Factor of the scores.
            pairs: Always None: the window follows from the slots.
            bias: Always None: blocks whose scores have a bias, a bound or sinks keep all tokens.
            softcap: Always 0.
            sinks: Always None.
        """
        assert v is not None
        assert pairs is None
        assert bias is None
        assert softcap == 0.0
        assert sinks is None
        new = torch.stack((k, v), dim=2).permute(0, 3, 2, 1, 4)  # [B, K, 2, S, D]
        if k.shape[1] == 1:
            return self._attend_once(q, new, scale)
        return self._attend_by_blocks(q, new, scale)

    def _attend_once(self, q: Tensor, new: Tensor, scale: float) -> Tensor:
        """Attend with one token: the order of keys does not matter."""
        slots = self.pairs.shape[3]
        self.pairs[:, :, :, self.length % slots] = new.squeeze(3)
        filled = min(self.length + 1, slots)
        mask = None
        if self.start is not None:
            tokens = tokens_in_slots(torch.arange(filled, device=q.device), slots, self.length)
            mask = (tokens >= self.start.unsqueeze(1))[:, None, None]  # [B, 1, 1, filled]
        keys, values = self.pairs[:, :, :, :filled].unbind(2)
        out = dot_product_attention(q.transpose(1, 2), keys, values, mask, scale)
        return out.transpose(1, 2)

    def _attend_by_blocks(self, q: Tensor, new: Tensor, scale: float) -> Tensor:
        """Attend with several tokens: to the window of earlier ones, joined with the new ones in order."""
        slots = self.pairs.shape[3]
        end = self.length + new.shape[3]
        old = min(self.length, slots)
        joined = new
        if old:
            earlier = torch.arange(self.length - old, self.length, device=q.device) % slots
            joined = torch.cat((self.pairs.index_select(3, earlier), new), dim=3)
        length = joined.shape[3]
        starts = None
        if self.start is not None:  # padding before the first token is a document of its own
            indices = torch.arange(length, device=q.device)
            first = (self.start - (self.length - old)).unsqueeze(1)
            starts = torch.where(indices >= first, first.clamp(min=0), 0)
        seen = VisiblePairs(length, q.device, starts, window_rule(slots), slots)
        keys, values = joined.unbind(2)
        queries = range(old, old + q.shape[1])
        if q.device.type == "cpu":
            out = blocked_attention(q.transpose(1, 2), keys, values, seen, scale, queries=[queries])
        else:
            out = attention_by_chunks(q.transpose(1, 2), keys, values, seen, scale, queries)
        kept = min(slots, length)
        self.pairs.index_copy_(3, torch.arange(end - kept, end, device=q.device) % slots, joined[:, :, :, -kept:])
        return out.transpose(1, 2)


def tokens_in_slots(slots: Tensor, number: int, last: int | Tensor) -> Tensor:
    """Return the index of the token in each of these slots of a ring; negative for empty slots.

    Args:
        slots: Numbers of slots.
        number: Number of all slots of the ring.
        last: Index of the newest token.
    """
    return last - (last - slots) % number
