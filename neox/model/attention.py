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
from neox.model.context import BlockContext
from neox.model.head_norms import query_key_norms
from neox.model.positions import POSITIONS, PositionEncoding, Tables
from neox.ops import AttentionImpl, block_layout, core_attention, linear, sparse_pairs
from neox.parallel import ColumnParallelLinear, ParallelGrid, RowParallelLinear, Summand, TensorOptions


class SelfAttention(nn.Module):
    """Multi-head attention with heads split over tensor ranks; causal unless the network is bidirectional.

    The rows of the fused projection are laid out [heads, 3, D] as in NeoX. If there are fewer heads of keys and values
    than of queries, they are all queries, all keys, all values of this rank.

    Args:
        architecture: The network.
        number: Number of the block, from 0.
        grid: Process groups; the numbers of heads must be multiples of the tensor-parallel degree.
        impl: Kernel.
        dropout: Probability of dropping an attention weight in training.
        layer_scaling: NeoX's query-key layer scaling: divide scores by the block's number, counted from 1.
        **options: Device and type of the parameters.

    Attributes:
        recompute: What the backward pass computes again: `full_attn` everything before the output projection,
            `core_attn` everything after queries, keys and values.

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
        heads = architecture.num_attention_heads
        kv_heads = architecture.num_kv_heads
        if heads % kv_heads or kv_heads % grid.tp_size:
            raise ValueError(
                f"num_attention_heads {heads} must be a multiple of num_kv_heads {kv_heads}, and that of the "
                f"tensor-parallel degree {grid.tp_size}"
            )
        self.grid = grid
        self.impl: AttentionImpl = impl
        self.causal = not architecture.bidirectional
        self.heads_here = heads // grid.tp_size
        self.kv_heads_here = kv_heads // grid.tp_size
        self.attended_heads = architecture.attended_heads // grid.tp_size
        self.head_dim = architecture.head_dim
        self.dropout = dropout
        self.softmax_scale = 1.0
        if layer_scaling:
            self.softmax_scale = float(number + 1)
        divisor = math.sqrt(self.head_dim)
        if architecture.attention_scale:
            divisor = 1.0 / architecture.attention_scale
        self.scale = 1.0 / (divisor * self.softmax_scale)

        hidden = architecture.hidden_size
        rows = (heads + 2 * kv_heads) * self.head_dim
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
        self._encoding_name: str | None = None
        build_encoding = POSITIONS[architecture.positions].attention
        if build_encoding is not None:
            encoding = build_encoding(architecture, grid, **options)
            self._encoding_name = encoding.name
            self.add_module(encoding.name, encoding)

    def forward(self, x: Tensor, context: BlockContext) -> Tensor:
        """Attend: hidden states [B, S, H] -> [B, S, H]; with sequence parallelism, shares of them [B, S/T, H]."""
        return self.dense(self._heads(x, context))

    def summand(self, x: Tensor, context: BlockContext) -> Summand:
        """Return what `forward` does, before the sum over tensor ranks."""
        return self.dense.summand(self._heads(x, context))

    def _heads(self, x: Tensor, context: BlockContext) -> Tensor:
        """Return the outputs of this rank's heads: [B, S, H] -> [B, S, N*D]."""
        return self._recomputed("full_attn", self._attend, x, context)

    def _attend(self, x: Tensor, context: BlockContext) -> Tensor:
        encode = None
        bias = None
        encoding = self.encoding
        if encoding is not None:
            assert context.tables is not None
            encode = partial(encoding, tables=context.tables)
            bias = encoding.score_bias(context.tables)
        q, k, v = self._queries_keys_values(x, encode)
        positions = context.positions
        cache = context.cache
        if cache is not None:
            pairs = self.pairs(positions, cache.positions)
            out = cache.attend(q, k, v, self.scale * self.softmax_scale, pairs, bias)
        else:
            mask = _both(context.visible, self.pairs(positions, positions))
            if self.impl == "flash" and bias is None:  # the kernel keeps nothing that would be worth recomputing
                out = self._core(q, k, v, mask, bias)
            else:
                out = self._recomputed("core_attn", self._core, q, k, v, mask, bias)
        return out.flatten(2)

    def _core(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None) -> Tensor:
        dropout_p = 0.0
        dropout_context = None
        if self.training and self.dropout > 0.0:
            dropout_p = self.dropout
            if self.grid.rng.enabled:  # each tensor rank drops weights of its own heads
                dropout_context = self.grid.rng.fork(q.device)
        return core_attention(
            q,
            k,
            v,
            impl=self.impl,
            scale=self.scale,
            softmax_scale=self.softmax_scale,
            dropout_p=dropout_p,
            dropout_context=dropout_context,
            causal=self.causal,
            mask=mask,
            bias=bias,
        )

    def _recomputed(self, part: RecomputedPart, function: Callable[..., Tensor], *args: Any) -> Tensor:
        """Call a function. In training, the activations of a part that is to be recomputed are not kept."""
        if self.recompute == part and self.training and torch.is_grad_enabled():
            return cast(Tensor, self.grid.rng.checkpoint(function, *args))
        return function(*args)

    def _queries_keys_values(
        self, x: Tensor, encode: Callable[[Tensor], Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [B, S, N, D], keys and values [B, S, K, D], normalised and with their positions.

        Args:
            x: Hidden states [B, S, H].
            encode: Puts positions into queries and keys [B, S, N, 1 or 2, D].
        """
        n = self.heads_here
        k = self.kv_heads_here
        qkv = self.query_key_value(x)
        batch, length, _ = qkv.shape
        if n == k:
            together, values = qkv.view(batch, length, n, 3, self.head_dim).split((2, 1), dim=3)  # [B, S, N, 2, D]
            values = values.squeeze(3)
        else:
            together, values = qkv.view(batch, length, n + 2 * k, self.head_dim).split((n + k, k), dim=2)
            together = together.unsqueeze(3)  # [B, S, N + K, 1, D]
        if encode is not None and not self._norm_names:
            together = encode(together)
        if n == k:
            queries, keys = together.unbind(3)
        else:
            queries, keys = together.squeeze(3).split((n, k), dim=2)
        if not self._norm_names:
            return queries, keys, values
        if self.attended_heads != k:  # each query head gets keys and values of its own
            keys = keys.repeat_interleave(n // k, dim=2)
            values = values.repeat_interleave(n // k, dim=2)
        queries = self.get_submodule(self._norm_names[0])(queries)
        keys = self.get_submodule(self._norm_names[-1])(keys)
        if encode is not None:
            queries = encode(queries.unsqueeze(3)).squeeze(3)
            keys = encode(keys.unsqueeze(3)).squeeze(3)
        return queries, keys, values

    def pairs(self, queries: Tensor, keys: Tensor) -> Tensor | None:
        """Return the pairs that this kind of attention allows, for positions [S] or [B, S] and [T] or [B, T].

        Returns:
            Bool [B or 1, N or 1, S, T], causal; None for all earlier keys.
        """
        return None

    @property
    def encoding(self) -> PositionEncoding | None:
        """What positions do here, if anything."""
        if self._encoding_name is None:
            return None
        return cast(PositionEncoding, getattr(self, self._encoding_name))

    def position_tables(
        self, positions: Tensor, keys: int, dtype: torch.dtype, slots: Tensor | None = None
    ) -> Tables | None:
        """Return what blocks need of the new tokens; arguments as `PositionEncoding.tables` takes them."""
        if self.encoding is None:
            return None
        return self.encoding.tables(positions, keys, dtype, slots)


class SparseSelfAttention(SelfAttention):
    """Self-attention to the keys that a pattern of blocks allows (`neox.architecture.sparsity`).

    Attributes:
        layout: Blocks that see each other in the longest sequence, bool [N or 1, C, C]; in no checkpoint.
    """

    layout: Tensor

    def __init__(self, architecture: Architecture, number: int, grid: ParallelGrid, **arguments: Any) -> None:
        assert not architecture.bidirectional, "patterns of blocks are causal"
        super().__init__(architecture, number, grid, **arguments)
        self.number = number
        self.kind = architecture.attention[number]
        self.settings = settings_of(self.kind, architecture.sparsity)
        self.block: int = self.settings["block"]
        self.longest_blocks = -(-architecture.max_positions // self.block)
        layout = self._layout_of(self.longest_blocks).to(arguments.get("device"))
        self.register_buffer("layout", layout, persistent=False)

    def reset(self) -> None:
        """Compute the buffer again, after a module made on the meta device got memory."""
        self.layout.copy_(self._layout_of(self.longest_blocks))

    def pairs(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return the pairs whose blocks see each other."""
        layout = self.layout
        blocks = -(-keys.shape[-1] // self.block)
        if blocks > self.longest_blocks:  # rows with padding may be longer than the network is meant for
            layout = self._layout_of(blocks).to(queries.device)
        return sparse_pairs(layout, self.block, queries, keys)

    def _layout_of(self, blocks: int) -> Tensor:
        first = self.grid.tp_rank * self.heads_here
        heads = range(first, first + self.heads_here)
        return block_layout(self.kind, self.settings, blocks=blocks, heads=heads, layer=self.number)


class WindowedSelfAttention(SelfAttention):
    """Self-attention to the last `window` tokens, the query's own included."""

    def __init__(self, architecture: Architecture, number: int, grid: ParallelGrid, **arguments: Any) -> None:
        assert not architecture.bidirectional, "a window is causal"
        super().__init__(architecture, number, grid, **arguments)
        self.window = architecture.window

    def pairs(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return the pairs that lie at most `window` - 1 positions apart."""
        distance = queries.unsqueeze(-1) - keys.unsqueeze(-2)
        seen = (distance >= 0) & (distance < self.window)
        if seen.dim() == 2:
            return seen[None, None]
        return seen.unsqueeze(1)


def _both(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Return the pairs that both masks allow; None allows all."""
    if a is None:
        return b
    if b is None:
        return a
    return a & b


ATTENTION: Mapping[str, type[SelfAttention]] = MappingProxyType(
    {"global": SelfAttention, "sliding_window": WindowedSelfAttention, **dict.fromkeys(SPARSITY, SparseSelfAttention)}
)
"""Kind of attention (`Architecture.attention`) -> module."""
