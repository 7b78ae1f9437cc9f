"""Cache of the keys and values of earlier tokens, preallocated, for generation.

Legend: L layers, B batch, N heads of queries and K of keys here, T slots, S new tokens, D head dim.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from neox.architecture import Architecture
from neox.errors import NeoXError
from neox.ops import explicit_attention, masked_bias
from neox.parallel import ParallelGrid


class KVCache:
    """Keys and values of all blocks on this rank, next to each other in one tensor.

    `reset` makes it ready for other prompts without new memory.

    Attributes:
        pairs: Keys and values, [L, B, K, 2, T, D].
        max_length: Number of slots, T.
        length: Number of slots that are filled, from the first.
        start: First slot of each row that holds a token, [B], if rows are padded on the left; positions count from
            there. None if all rows begin at 0.
    """

    def __init__(
        self,
        architecture: Architecture,
        grid: ParallelGrid,
        num_blocks: int,
        batch: int,
        max_length: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        heads = architecture.attended_heads // grid.tp_size
        if not architecture.has_cache:
            raise NeoXError(
                "blocks that gate over positions (gmlp, amlp) have no keys and values to keep: generate with the whole "
                "sequence computed at each step, as the runner does for such a network"
            )
        max_length += architecture.soft_prompt_tokens
        shape = (num_blocks, batch, heads, 2, max_length, architecture.head_dim)
        self.pairs = torch.zeros(shape, device=device, dtype=dtype)
        self.max_length = max_length
        self.length = 0
        self.start: Tensor | None = None

    def reset(self, start: Tensor | None = None) -> None:
        """Forget all tokens."""
        self.length = 0
        self.start = start

    @property
    def begun(self) -> bool:
        """Whether it holds tokens."""
        return self.length > 0

    def keys(self, new_tokens: int) -> int:
        """Return the number of keys that new tokens are compared with, their own included."""
        return self.length + new_tokens

    def positions(self, new_tokens: int) -> Tensor:
        """Return the positions of the next tokens: [S], or [B, S] for padded rows (0 in the padding)."""
        return self._positions(torch.arange(self.length, self.length + new_tokens, device=self.pairs.device))

    def layers(self, new_tokens: int) -> list[LayerCache]:
        """Return each layer's view for a forward pass of `new_tokens`.

        Raises:
            NeoXError: If they do not fit.
        """
        self.check_room(new_tokens)
        end = self.keys(new_tokens)
        mask, causal = self._mask(new_tokens)
        positions = self._positions(torch.arange(end, device=self.pairs.device))
        # Views of all layers at once: layer by layer they would cost a fifth of a small model's step.
        new = self.pairs.narrow(4, self.length, new_tokens).unbind(0)
        keys, values = self.pairs.narrow(4, 0, end).unbind(3)
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
        filled = self.pairs[:, rows, ..., : self.length, :]
        if len(rows) != self.pairs.shape[1]:  # new memory only if their number changes
            self.pairs = self.pairs.new_zeros(self.pairs.shape[0], len(rows), *self.pairs.shape[2:])
        self.pairs[..., : self.length, :] = filled
        if self.start is not None:
            self.start = self.start[rows]

    def advance(self, new_tokens: int) -> None:
        """Count `new_tokens` slots as filled; called once after all layers have appended."""
        self.length += new_tokens

    def _positions(self, slots: Tensor) -> Tensor:
        """Return the positions of the tokens in these slots."""
        if self.start is None:
            return slots
        return (slots - self.start.unsqueeze(1)).clamp_(min=0)

    def _mask(self, new_tokens: int) -> tuple[Tensor | None, bool]:
        """Return a mask, bool [B or 1, 1, S, length + S] or None, and whether plain causality has to be added."""
        if self.start is None and (new_tokens == 1 or self.length == 0):
            return None, new_tokens > 1
        slots = torch.arange(self.length + new_tokens, device=self.pairs.device)
        allowed = slots.unsqueeze(0) <= slots[self.length :].unsqueeze(1)  # [S, length + S]
        if self.start is None:
            return allowed[None, None], False
        seen = slots.unsqueeze(0) >= self.start.unsqueeze(1)  # [B, length + S]
        # Padding attends to itself: a row of the softmax with nothing in it would be NaN.
        itself = slots.unsqueeze(0) == slots[self.length :].unsqueeze(1)
        return ((allowed & seen.unsqueeze(1)) | itself).unsqueeze(1), False


class LayerCache(NamedTuple):
    """One layer's part of a KVCache during one forward pass.

    Attributes:
        new: View [B, K, 2, S, D] of the slots of the new tokens.
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
        v: Tensor,
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
            v: New values.
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
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            self.keys,
            self.values,
            attn_mask=mask,
            is_causal=self.causal and mask is None,
            scale=scale,
            enable_gqa=q.shape[2] != k.shape[2],
        )
        return out.transpose(1, 2)
