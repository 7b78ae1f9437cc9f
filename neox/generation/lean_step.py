"""One new token per sequence through the blocks, in as few operations as possible.

At one token, a matrix product takes microseconds, and what the modules do around it (tables per layer, views, joins,
dropout that is off) as long again. The mathematics is that of `TransformerLayer`; tests compare the two.

Legend: B batch, H hidden, N heads, D head dim, R rotary dims.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from neox.model import KVCache, LayerCache, TransformerLayer
from neox.ops import rotary_tables


@dataclass(frozen=True)
class Place:
    """Where the new tokens stand. cos, sin: [R], or [B, 1, 1, R] where rows are padded, the second with the sign of the
    half it multiplies; None without rotary positions."""

    cos: Tensor | None
    sin: Tensor | None


class LeanStep:
    """The blocks of one rank, whose heads are all here."""

    def __init__(self, blocks: Sequence[TransformerLayer], max_length: int, device: torch.device, dtype: torch.dtype):
        self.blocks = [LeanBlock(block) for block in blocks]
        self.cos = self.sin = None
        rotary = blocks[0].attention.rotary_emb if blocks else None
        if rotary is not None:
            cos, sin = rotary_tables(rotary.inv_freq, torch.arange(max_length, device=device), dtype)
            self.cos = torch.cat((cos, cos), dim=-1).squeeze(1)  # [positions, R]
            self.sin = torch.cat((-sin, sin), dim=-1).squeeze(1)

    def __call__(self, x: Tensor, cache: KVCache) -> Tensor:
        """x [B, 1, H] -> [B, 1, H]; appends to the cache."""
        parts = cache.layers(1)  # refuses what does not fit
        place = self._place(cache)
        x = x.squeeze(1)
        for block, part in zip(self.blocks, parts, strict=True):
            x = block(x, place, part)
        cache.advance(1)
        return x.unsqueeze(1)

    def _place(self, cache: KVCache) -> Place:
        if self.cos is None or self.sin is None:
            return Place(None, None)
        positions = cache.positions(1)
        if cache.start is None:
            return Place(self.cos[cache.length], self.sin[cache.length])
        # A row that has reached the end of the context goes on unseen while others finish.
        rows = positions.view(-1, 1, 1).clamp(max=len(self.cos) - 1)
        return Place(self.cos[rows], self.sin[rows])


class LeanBlock:
    """One block's parts, ready to hand."""

    def __init__(self, block: TransformerLayer) -> None:
        attention, mlp = block.attention, block.mlp
        self.heads, self.head_dim = attention.heads_here, attention.head_dim
        self.scale = attention.scale * attention.softmax_scale
        self.parallel_residual = block.parallel_residual
        self.query_key_value, self.dense = attention.query_key_value, attention.dense
        self.expand, self.contract, self.activation = mlp.dense_h_to_4h, mlp.dense_4h_to_h, mlp.activation
        self.norms = (_norm(block.input_layernorm), _norm(block.post_attention_layernorm))

    def __call__(self, x: Tensor, place: Place, part: LayerCache) -> Tensor:
        """x [B, H] -> [B, H]; part: the layer's cache."""
        first, second = self.norms
        attended = _times(self.dense, self._attend(F.layer_norm(x, *first), place, part))
        if self.parallel_residual:
            return (x + attended).add_(self._mlp(F.layer_norm(x, *second)))
        x = x + attended
        return x + self._mlp(F.layer_norm(x, *second))

    def _attend(self, x: Tensor, place: Place, part: LayerCache) -> Tensor:
        """Return the heads' outputs [B, N * D]."""
        qkv = _times(self.query_key_value, x).view(-1, self.heads, 3, self.head_dim)
        if place.cos is not None and place.sin is not None:
            turned = qkv[:, :, :2, : place.cos.size(-1)]  # of queries and keys, the part that rotates
            swapped = turned.roll(turned.size(-1) // 2, dims=-1)
            turned.mul_(place.cos).addcmul_(swapped, place.sin)
        heads = qkv.unsqueeze(3)  # [B, N, 3, 1, D]
        part.new.copy_(heads.narrow(2, 1, 2))
        out = part.attend_appended(heads.select(2, 0), self.scale)
        return out.reshape(x.size(0), -1)

    def _mlp(self, x: Tensor) -> Tensor:
        return _times(self.contract, self.activation(_times(self.expand, x)))


def _norm(norm: nn.LayerNorm) -> tuple[tuple[int, ...], Tensor, Tensor, float]:
    """Return the arguments of `F.layer_norm`."""
    return norm.normalized_shape, norm.weight, norm.bias, norm.eps


def _times(linear: nn.Module, x: Tensor) -> Tensor:
    """Multiply as the layer does, without the module's call."""
    return linear.multiply(x, linear.weight, linear.bias)
