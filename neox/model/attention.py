"""Self-attention of one block, by name of the attention kind.

Legend: B batch, S sequence, H hidden, N heads here, K heads of keys and values here, D head dim, T tensor ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Unpack, cast

import torch
from torch import Tensor, nn

from neox.architecture import SPARSITY, Architecture, settings_of
from neox.config.sections.training import RecomputedPart
from neox.model.cache_step import CachedLayer
from neox.model.head_norms import query_key_norms
from neox.model.positions import POSITIONS, PositionEncoding, Tables
from neox.ops import AttentionImpl, block_layout, core_attention, linear, sparse_pairs
from neox.parallel import ColumnParallelLinear, ParallelGrid, RowParallelLinear, TensorOptions


class SelfAttention(nn.Module):
    """Multi-head attention with heads split over tensor ranks, causal unless the network is bidirectional.

    The rows of the fused projection are laid out [heads, 3, D] as in NeoX, or all queries, all keys, all values of this
    rank where there are fewer heads of keys and values.

    Args:
        architecture: The network.
        number: Of the block, from 0.
        grid: Process groups; the numbers of heads must be multiples of the tensor-parallel degree.
        impl: Kernel.
        dropout: Probability of dropping an attention weight in training.
        layer_scaling: NeoX's query-key layer scaling: divide scores by the block's number from 1.
        **options: Device and type of the parameters.

    Attributes:
        recompute: What is computed again in the backward pass: `full_attn` all that `forward` does, `core_attn` what
            comes after queries, keys and values.

    Raises:
        ValueError: The heads cannot be divided.
    """

    recompute: RecomputedPart = "none"

    def __init__(
        self,
        architecture: Architecture,
        number: int,
        grid: ParallelGrid,
        *,
        impl: AttentionImpl,
        dropout: float = 0.0,
        layer_scaling: bool = False,
        **options: Unpack[TensorOptions],
    ) -> None:
        super().__init__()
        heads, kv_heads = architecture.num_attention_heads, architecture.num_kv_heads
        if heads % kv_heads or kv_heads % grid.tp_size:
            raise ValueError(
                f"num_attention_heads {heads} must be a multiple of num_kv_heads {kv_heads}, and that of the "
                f"tensor-parallel degree {grid.tp_size}"
            )
        self.grid = grid
        self.impl: AttentionImpl = impl
        self.causal = not architecture.bidirectional
        self.heads_here, self.kv_heads_here = heads // grid.tp_size, kv_heads // grid.tp_size
        self.attended_heads = architecture.attended_heads // grid.tp_size
        self.head_dim = architecture.head_dim
        self.dropout = dropout
        self.softmax_scale = float(number + 1 if layer_scaling else 1)
        divisor = 1.0 / architecture.attention_scale if architecture.attention_scale else math.sqrt(self.head_dim)
        self.scale = 1.0 / (divisor * self.softmax_scale)
        hidden, rows = architecture.hidden_size, (heads + 2 * kv_heads) * self.head_dim
        self.query_key_value = ColumnParallelLinear(
            hidden, rows, grid, bias=architecture.qkv_bias, multiply=linear, **options
        )
        norms = query_key_norms(architecture, grid, **options)
        self._norm_names = tuple(norms)
        for name, norm in norms.items():
            self.add_module(name, norm)
        self.dense = RowParallelLinear(
            heads * self.head_dim, hidden, grid, bias=architecture.attention_output_bias, multiply=linear, **options
        )
        build = POSITIONS[architecture.positions].attention
        encoding = None if build is None else build(architecture, grid, **options)
        self._encoding_name = None if encoding is None else encoding.name
        if encoding is not None:
            self.add_module(encoding.name, encoding)

    def forward(
        self,
        x: Tensor,
        tables: Tables | None = None,
        cache: CachedLayer | None = None,
        visible: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Return the heads' outputs, before the output projection `dense`: x [B, S, H] -> [B, S, N*D].

        Args:
            x: Hidden states; where tokens are divided, those of this rank's share [B, S/T, H].
            tables: Of the positions (`position_tables`); those of 0..S-1 if None.
            cache: Keys and values seen before, in generation.
            visible: Pairs (query, key) that see each other, bool [B, 1, S or 1, S]; all (earlier) ones if None.
            positions: Of the tokens, [S] or [B, S]; 0..S-1 if None.
        """
        return self._recomputed("full_attn", self._attend, x, tables, cache, visible, positions)

    def _attend(
        self,
        x: Tensor,
        tables: Tables | None,
        cache: CachedLayer | None,
        visible: Tensor | None,
        positions: Tensor | None,
    ) -> Tensor:
        batch, length = x.shape[0], x.shape[1] * self.query_key_value.shares
        positions = torch.arange(length, device=x.device) if positions is None else positions
        encoding, bias = self.encoding, None
        if encoding is not None:
            if tables is None:
                tables = encoding.tables(positions, length if cache is None else cache.keys.shape[2], x.dtype)
            bias = encoding.score_bias(tables)
        q, k, v = self._queries_keys_values(x, tables)
        if cache is not None:
            pairs = self.pairs(positions, cache.positions)
            out = cache.attend(q, k, v, self.scale * self.softmax_scale, pairs, bias)
        else:
            mask = _both(visible, self.pairs(positions, positions))
            keeps_scores = self.impl != "flash" or bias is not None
            out = self._recomputed("core_attn" if keeps_scores else "", self._core, q, k, v, mask, bias)
        return out.reshape(batch, length, self.heads_here * self.head_dim)

    def _core(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None) -> Tensor:
        dropout_p = self.dropout if self.training else 0.0
        return core_attention(
            q,
            k,
            v,
            impl=self.impl,
            scale=self.scale,
            softmax_scale=self.softmax_scale,
            dropout_p=dropout_p,
            dropout_context=self.grid.rng.fork(q.device) if dropout_p > 0.0 and self.grid.rng.enabled else None,
            causal=self.causal,
            mask=mask,
            bias=bias,
        )

    def _recomputed(self, part: str, function: Callable[..., Tensor], *args: Any) -> Tensor:
        """Call a function; in training without keeping its activations where it is the part to recompute."""
        if self.recompute == part and self.training and torch.is_grad_enabled():
            return cast(Tensor, self.grid.rng.checkpoint(function, *args))
        return function(*args)

    def _queries_keys_values(self, x: Tensor, tables: Tables | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [B, S, N, D], keys and values [B, S, K, D], normalised and with their positions."""
        n, k = self.heads_here, self.kv_heads_here
        qkv = self.query_key_value(x)
        batch, length, _ = qkv.shape
        if n == k:
            together, values = qkv.view(batch, length, n, 3, self.head_dim).split((2, 1), dim=3)  # [B, S, N, 2, D]
            values = values.squeeze(3)
        else:
            together, values = qkv.view(batch, length, n + 2 * k, self.head_dim).split((n + k, k), dim=2)
            together = together.unsqueeze(3)  # [B, S, N + K, 1, D]
        if not self._norm_names:
            together = self._encoded(together, tables)
        queries, keys = together.unbind(3) if n == k else together.squeeze(3).split((n, k), dim=2)
        if not self._norm_names:
            return queries, keys, values
        if self.attended_heads != k:
            keys, values = (heads.repeat_interleave(n // k, dim=2) for heads in (keys, values))
        queries = self.get_submodule(self._norm_names[0])(queries)
        keys = self.get_submodule(self._norm_names[-1])(keys)
        queries, keys = (self._encoded(heads.unsqueeze(3), tables).squeeze(3) for heads in (queries, keys))
        return queries, keys, values

    def _encoded(self, heads: Tensor, tables: Tables | None) -> Tensor:
        return heads if self.encoding is None or tables is None else self.encoding(heads, tables)

    def pairs(self, queries: Tensor, keys: Tensor) -> Tensor | None:
        """Return the pairs that this kind of attention allows, for positions [S] or [B, S] and [T] or [B, T].

        Returns:
            Bool [B or 1, N or 1, S, T], causal; None for all earlier keys.
        """
        return None

    @property
    def encoding(self) -> PositionEncoding | None:
        """What positions do here, if anything."""
        return None if self._encoding_name is None else cast(PositionEncoding, getattr(self, self._encoding_name))

    def position_tables(
        self, positions: Tensor, keys: int, dtype: torch.dtype, slots: Tensor | None = None
    ) -> Tables | None:
        """Return what blocks need of the new tokens; arguments as `PositionEncoding.tables` takes them."""
        return None if self.encoding is None else self.encoding.tables(positions, keys, dtype, slots)


class SparseSelfAttention(SelfAttention):
    """Self-attention to the keys that a pattern of blocks allows (`neox.architecture.sparsity`)."""

    def __init__(self, architecture: Architecture, number: int, grid: ParallelGrid, **arguments: Any) -> None:
        super().__init__(architecture, number, grid, **arguments)
        kind = architecture.attention[number]
        settings = settings_of(kind, architecture.sparsity)
        first = grid.tp_rank * self.heads_here
        self.block: int = settings["block"]
        self._new_layout = partial(
            block_layout, kind, settings, heads=range(first, first + self.heads_here), layer=number
        )
        self._layout = self._new_layout(blocks=-(-architecture.max_positions // self.block))

    def pairs(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return the pairs whose blocks see each other."""
        blocks = -(-keys.shape[-1] // self.block)
        if blocks > self._layout.shape[-1]:  # longer than the network is meant for
            self._layout = self._new_layout(blocks=blocks)
        self._layout = self._layout.to(queries.device)
        return sparse_pairs(self._layout, self.block, queries, keys)


class WindowedSelfAttention(SelfAttention):
    """Self-attention to the last `window` tokens, the query's own included."""

    def __init__(self, architecture: Architecture, number: int, grid: ParallelGrid, **arguments: Any) -> None:
        super().__init__(architecture, number, grid, **arguments)
        self.window = architecture.window

    def pairs(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return the pairs that lie at most `window` - 1 positions apart."""
        distance = queries.unsqueeze(-1) - keys.unsqueeze(-2)
        seen = (distance >= 0) & (distance < self.window)
        return seen.unsqueeze(-3) if seen.dim() == 3 else seen[None, None]


def _both(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a & b


ATTENTION: Mapping[str, type[SelfAttention]] = MappingProxyType(
    {"global": SelfAttention, "sliding_window": WindowedSelfAttention, **dict.fromkeys(SPARSITY, SparseSelfAttention)}
)
