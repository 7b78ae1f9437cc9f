"""Blocks with a parallel residual as two matrix products each, for reading weights as fast as memory gives them.

Attention and MLP of such a block read the same x and add to the same x. The weight and bias of each LayerNorm go into
the product behind it (W diag(g) x + W b), so that x is normalised once, and one product gives queries, keys, values and
the wide activations; one more multiplies the heads' outputs and the activations, side by side. At one token a product
costs some 25 microseconds beside reading its weights, and two are saved in every block.

The merged weights are all there is (the modules are given up), so whole prompts go this way too. In each head the rows
of queries and keys that rotate are put in pairs (i, i + R/2), which makes the rotation one complex product; the scores
do not depend on the order, and the cache is written and read here alone.

Legend: B batch, S tokens fed, H hidden, F wide (4H), N heads, D head dim, R rotary dims.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from neox.generation.packed import PackedWeight
from neox.model import KVCache, LayerCache, TransformerLayer
from neox.parallel import ColumnParallelLinear


def can_merge(blocks: Iterable[TransformerLayer], dtype: torch.dtype) -> bool:
    """Whether these blocks can be merged (and packed, which `can_pack` knows): whole ones with a parallel residual.

    In fp32 alone: in half precision the products of weights would be rounded, and there are no complex numbers.
    """
    return dtype == torch.float32 and all(
        block.parallel_residual
        and block.grid.tp_size == 1
        and block.attention.head_dim % 2 == 0
        and block.input_layernorm.eps == block.post_attention_layernorm.eps
        for block in blocks
    )


@dataclass(frozen=True)
class Place:
    """Where the tokens stand, and how the first product's output [B * S, 3H + F] is read there.

    heads: sizes and strides of [B, N, 3, S, D] in it. turned: of [B, N, 2, S, R/2], as complex numbers. turns: complex
    [S, R/2], or [B, 1, 1, S, R/2] where rows are padded; None without rotary positions.
    """

    heads: tuple[tuple[int, ...], tuple[int, ...]]
    turned: tuple[tuple[int, ...], tuple[int, ...]]
    turns: Tensor | None


class MergedBlocks:
    """The merged blocks of one rank. max_length: tokens of context."""

    def __init__(self, blocks: Iterable[TransformerLayer], max_length: int) -> None:
        """Merge one block after the other: of an iterator that gives them up, few copies of one exist at a time."""
        self.heads = self.head_dim = self.wide = 0
        self.turns: Tensor | None = None  # [positions, R/2]
        self.blocks: list[MergedBlock] = []
        for block in blocks:
            if not self.blocks:
                self._measure(block, max_length)
            self.blocks.append(MergedBlock(block))

    def _measure(self, block: TransformerLayer, max_length: int) -> None:
        attention = block.attention
        self.heads, self.head_dim = attention.heads_here, attention.head_dim
        self.wide = block.mlp.dense_h_to_4h.weight.size(0)
        if attention.rotary_emb is not None:
            angles = torch.outer(torch.arange(max_length, dtype=torch.float32), attention.rotary_emb.inv_freq.float())
            self.turns = torch.complex(angles.cos(), angles.sin())

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        return KVCache(len(self.blocks), batch, capacity, self.heads, self.head_dim, dtype=torch.float32)

    def __call__(self, x: Tensor, cache: KVCache | None) -> Tensor:
        shape = x.shape
        batch, length, hidden = shape
        place = self._place(batch, length, cache)
        x = x.reshape(-1, hidden)
        if cache is None:
            for block in self.blocks:
                x = block(x, place, None)
        else:
            for block, part in zip(self.blocks, cache.layers(length), strict=True):
                x = block(x, place, part)
            cache.advance(length)
        return x.view(shape)

    def _place(self, batch: int, length: int, cache: KVCache | None) -> Place:
        heads, size = self.heads, self.head_dim
        row = 3 * heads * size + self.wide
        turns, pairs = self.turns, 0
        if turns is not None:
            pairs = turns.size(1)
            if cache is not None and cache.start is None:
                turns = turns[cache.length : cache.length + length]
            else:
                # A row that has reached the end of the context goes on unseen while others finish.
                rows = (torch.arange(length) if cache is None else cache.positions(length)).clamp(max=len(turns) - 1)
                turns = turns[rows] if cache is None else turns[rows][:, None, None]
        return Place(
            heads=((batch, heads, 3, length, size), (length * row, 3 * size, size, row, 1)),
            turned=(
                (batch, heads, 2, length, pairs),
                (length * row // 2, 3 * size // 2, size // 2, row // 2, 1),
            ),
            turns=turns,
        )


class MergedBlock:
    """One block's two products."""

    def __init__(self, block: TransformerLayer) -> None:
        attention, mlp = block.attention, block.mlp
        self.scale = attention.scale * attention.softmax_scale
        self.activation = mlp.activation
        self.normalized_shape, self.eps = block.input_layernorm.normalized_shape, block.input_layernorm.eps
        first, first_bias = _fold(block.input_layernorm, attention.query_key_value)
        second, second_bias = _fold(block.post_attention_layernorm, mlp.dense_h_to_4h)
        if attention.rotary_emb is not None:
            rows = _rows_in_pairs(attention.heads_here, attention.head_dim, attention.rotary_emb.rotary_ndims)
            first, first_bias = first[rows], first_bias[rows]
        self.split, self.wide = first.size(0), second.size(0)  # 3H, F
        expand = PackedWeight(torch.cat((first, second)))
        contract = PackedWeight(torch.cat((attention.dense.weight, mlp.dense_4h_to_h.weight), dim=1))
        self.multiply, self.expand, self.contract = expand.multiply, expand.packed, contract.packed
        self.expand_bias = torch.cat((first_bias, second_bias))
        self.contract_bias = attention.dense.bias + mlp.dense_4h_to_h.bias

    def __call__(self, x: Tensor, place: Place, part: LayerCache | None) -> Tensor:
        """x [B * S, H] -> [B * S, H]; part: the layer's cache, None for none.

        All in one function: where a step's weights have emptied the caches, a call in Python takes microseconds.
        """
        normalized = torch.layer_norm(x, self.normalized_shape, None, None, self.eps, False)
        y = self.multiply(normalized, self.expand, self.expand_bias, "none", [], "")
        if place.turns is not None:
            y.view(torch.complex64).as_strided(*place.turned).mul_(place.turns)
        heads = y.as_strided(*place.heads)
        if part is None:
            q, keys, values = heads.unbind(2)
            mask, causal = None, True
        else:
            new, keys, values, mask, causal = part
            q = heads.select(2, 0)
            new.copy_(heads.narrow(2, 1, 2))
        out = F.scaled_dot_product_attention(q, keys, values, mask, 0.0, causal, scale=self.scale)
        attended = out.transpose(1, 2).reshape(y.size(0), -1)
        both = torch.cat((attended, self.activation(y.narrow(1, self.split, self.wide))), dim=1)
        return self.multiply(both, self.contract, self.contract_bias, "none", [], "").add_(x)


def _fold(norm: nn.LayerNorm, linear: ColumnParallelLinear) -> tuple[Tensor, Tensor]:
    """Return weight [O, I] and bias [O] that make of a normalised x what `linear` makes of the whole norm of it."""
    weight = linear.weight.double()
    return (weight * norm.weight).float(), (linear.bias + weight @ norm.bias.double()).float()


def _rows_in_pairs(heads: int, head_dim: int, rotary_ndims: int) -> Tensor:
    """Return the order of the rows of [N, 3, D] in which dims i and i + R/2 of queries and keys are neighbours."""
    order = torch.arange(heads * 3 * head_dim).view(heads, 3, head_dim)
    turned = order[:, :2, :rotary_ndims]
    order[:, :2, :rotary_ndims] = turned.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    return order.flatten()
