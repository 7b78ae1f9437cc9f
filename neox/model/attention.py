"""Self-attention of one block, by name of the attention kind.

Legend: B batch, S sequence, H hidden, N heads here, D head dim.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Unpack

import torch
from torch import Tensor, nn

from neox.architecture import Architecture
from neox.model.cache import LayerCache
from neox.model.positions import POSITIONS, Tables
from neox.ops import AttentionImpl, core_attention, linear
from neox.parallel import ColumnParallelLinear, ParallelGrid, RowParallelLinear, TensorOptions


class SelfAttention(nn.Module):
    """Causal multi-head attention with heads split over tensor ranks.

    The rows of the fused projection are laid out [heads, 3, D] as in NeoX.

    Args:
        architecture: The network.
        grid: Process groups; the number of heads must be a multiple of the tensor-parallel degree.
        impl: Kernel.
        dropout: Probability of dropping an attention weight in training.
        layer_scaling: NeoX's query-key layer scaling: the block's number from 1, or 1 for off.
        **options: Device and type of the parameters.

    Raises:
        ValueError: The heads cannot be divided.
    """

    def __init__(
        self,
        architecture: Architecture,
        grid: ParallelGrid,
        *,
        impl: AttentionImpl,
        dropout: float = 0.0,
        layer_scaling: int = 1,
        **options: Unpack[TensorOptions],
    ) -> None:
        super().__init__()
        hidden, heads = architecture.hidden_size, architecture.num_attention_heads
        if hidden % heads or heads % grid.tp_size:
            raise ValueError(
                f"hidden_size {hidden} must be a multiple of num_attention_heads {heads}, and that of the "
                f"tensor-parallel degree {grid.tp_size}"
            )
        self.grid = grid
        self.impl: AttentionImpl = impl
        self.heads_here = heads // grid.tp_size
        self.head_dim = architecture.head_dim
        self.dropout = dropout
        self.softmax_scale = float(layer_scaling)
        self.scale = 1.0 / (math.sqrt(self.head_dim) * layer_scaling)
        self.query_key_value = ColumnParallelLinear(hidden, 3 * hidden, grid, multiply=linear, **options)
        encoding = POSITIONS[architecture.positions]
        self.rotary_emb = None if encoding is None else encoding(architecture, options.get("device"))
        self.dense = RowParallelLinear(hidden, hidden, grid, multiply=linear, **options)

    def forward(
        self,
        x: Tensor,
        tables: Tables | None = None,
        cache: LayerCache | None = None,
        same_document: Tensor | None = None,
    ) -> Tensor:
        """Return the heads' outputs, before the output projection `dense`: x [B, S, H] -> [B, S, N*D].

        Args:
            x: Hidden states.
            tables: Of the positions (`position_tables`); those of 0..S-1 if None.
            cache: Keys and values seen before, in generation.
            same_document: Pairs (query, key) that see each other, bool [B, 1, S, S]; all earlier ones if None.
        """
        batch, length, _ = x.shape
        qkv = self.query_key_value(x).view(batch, length, self.heads_here, 3, self.head_dim)
        if self.rotary_emb is None:
            q, k, v = qkv.unbind(3)  # each [B, S, N, D]
        else:
            tables = self.position_tables(torch.arange(length, device=x.device), x.dtype) if tables is None else tables
            queries_keys, v = qkv.split((2, 1), dim=3)
            q, k = self.rotary_emb(queries_keys, tables).unbind(3)
            v = v.squeeze(3)
        if cache is not None:
            out = cache.attend(q, k, v, self.scale * self.softmax_scale)
        else:
            out = core_attention(
                q,
                k,
                v,
                impl=self.impl,
                scale=self.scale,
                softmax_scale=self.softmax_scale,
                dropout_p=self.dropout if self.training else 0.0,
                dropout_context=self.grid.rng.fork(x.device) if self.grid.rng.enabled else None,
                same_document=same_document,
            )
        return out.reshape(batch, length, self.heads_here * self.head_dim)

    def position_tables(self, positions: Tensor, dtype: torch.dtype) -> Tables | None:
        """Return what blocks need of the tokens' positions [S] or [B, S]: the same for every block."""
        return None if self.rotary_emb is None else self.rotary_emb.tables(positions, dtype)


ATTENTION: Mapping[str, type[SelfAttention]] = MappingProxyType({"global": SelfAttention})
