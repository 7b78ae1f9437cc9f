"""Keys and values of tokens already seen, preallocated, for generation.

Legend: L layers, B batch, N heads here, T slots, S new tokens, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from neox.errors import NeoXError


class KVCache:
    """Keys and values [L, B, N, T, D], of which the first `length` slots are filled.

    start: [B], the first slot of each row that holds a token (rows padded on the left), or None where all begin at 0.
    Positions count from there. `reset` makes it ready for other prompts without new memory.
    """

    def __init__(
        self,
        num_layers: int,
        batch: int,
        max_length: int,
        heads_here: int,
        head_dim: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        shape = (num_layers, batch, heads_here, max_length, head_dim)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.max_length = max_length
        self.length = 0
        self.start: Tensor | None = None

    def reset(self, start: Tensor | None = None) -> None:
        """Forget all tokens."""
        self.length = 0
        self.start = start

    def positions(self, new_tokens: int) -> Tensor:
        """Return the positions of the next tokens: [S], or [B, S] for padded rows (0 in the padding)."""
        slots = torch.arange(self.length, self.length + new_tokens, device=self.keys.device)
        return slots if self.start is None else (slots - self.start.unsqueeze(1)).clamp_(min=0)

    def layers(self, new_tokens: int) -> list[LayerCache]:
        """Return each layer's view for a forward of `new_tokens`; NeoXError where they do not fit."""
        if self.length + new_tokens > self.max_length:
            raise NeoXError(
                f"the KV cache has room for {self.max_length} tokens; {self.length} are in it and {new_tokens} more "
                "do not fit: make max_length larger"
            )
        mask, causal = self._mask(new_tokens)
        return [LayerCache(k, v, self.length, mask, causal) for k, v in zip(self.keys, self.values, strict=True)]

    def reorder(self, rows: Tensor) -> None:
        """Keep these rows [B'] in this order, any of them several times, as beam search does."""
        self.keys, self.values = self._reordered(self.keys, rows), self._reordered(self.values, rows)
        if self.start is not None:
            self.start = self.start[rows]

    def advance(self, new_tokens: int) -> None:
        """Count `new_tokens` slots as filled; called once after all layers have appended."""
        self.length += new_tokens

    def _reordered(self, store: Tensor, rows: Tensor) -> Tensor:
        """Move rows of the filled part; new memory only where their number changes."""
        filled = store[:, rows, :, : self.length]
        if len(rows) != store.shape[1]:
            store = store.new_zeros(store.shape[0], len(rows), *store.shape[2:])
        store[:, :, :, : self.length] = filled
        return store

    def _mask(self, new_tokens: int) -> tuple[Tensor | None, bool]:
        """Return (boolean mask [B or 1, 1, S, length + S] or None, whether plain causality is all that is needed)."""
        if self.start is None and (new_tokens == 1 or self.length == 0):
            return None, new_tokens > 1
        slots = torch.arange(self.length + new_tokens, device=self.keys.device)
        allowed = slots.unsqueeze(0) <= slots[self.length :].unsqueeze(1)  # [S, length + S]
        if self.start is None:
            return allowed[None, None], False
        seen = slots.unsqueeze(0) >= self.start.unsqueeze(1)  # [B, length + S]
        # Padding attends to itself: a row of the softmax with nothing in it would be NaN.
        itself = slots.unsqueeze(0) == slots[self.length :].unsqueeze(1)
        return ((allowed & seen.unsqueeze(1)) | itself).unsqueeze(1), False


@dataclass(frozen=True)
class LayerCache:
    """One layer's part of a KVCache during one forward: keys, values [B, N, T, D] are views that `attend` writes."""

    keys: Tensor
    values: Tensor
    length: int
    mask: Tensor | None
    causal: bool

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Append k, v [B, S, N, D] and attend over everything seen: q [B, S, N, D] -> [B, S, N, D]."""
        end = self.length + q.shape[1]
        self.keys[:, :, self.length : end] = k.transpose(1, 2)
        self.values[:, :, self.length : end] = v.transpose(1, 2)
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            self.keys[:, :, :end],
            self.values[:, :, :end],
            attn_mask=self.mask,
            is_causal=self.causal,
            scale=scale,
        )
        return out.transpose(1, 2)
