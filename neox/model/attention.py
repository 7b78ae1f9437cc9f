"""Self-attention of one block.

Legend: B batch, S sequence, H hidden, N heads on this rank, D head dim, R rotary dims.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from neox.model.cache import LayerCache
from neox.ops import AttentionImpl, core_attention, linear, rotary_inv_freq, rotary_tables, rotate
from neox.parallel import ColumnParallelLinear, ParallelGrid, RowParallelLinear


class RotaryEmbedding(nn.Module):
    """Holds the rotary frequencies as NeoX's layer files do: buffer `inv_freq` [R/2], fp32."""

    inv_freq: Tensor

    def __init__(self, rotary_ndims: int, base: float, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.rotary_ndims, self.base = rotary_ndims, base
        self.register_buffer("inv_freq", rotary_inv_freq(rotary_ndims, base, device))

    def reset(self) -> None:
        """Compute the buffer again, after a module made on the meta device got memory."""
        self.inv_freq.copy_(rotary_inv_freq(self.rotary_ndims, self.base, self.inv_freq.device))

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return rotary_tables(self.inv_freq, positions, dtype)


class SelfAttention(nn.Module):
    """Causal multi-head attention with heads split over tensor ranks.

    The fused projection's rows are laid out [heads, 3, D] as in NeoX. rotary_ndims: 0 for no positions.
    layer_scaling: NeoX's query-key layer scaling, the layer's number from 1, or 1 for off.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        grid: ParallelGrid,
        *,
        impl: AttentionImpl,
        rotary_ndims: int,
        rotary_base: float,
        dropout: float = 0.0,
        layer_scaling: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if hidden_size % num_heads or num_heads % grid.tp_size:
            raise ValueError(
                f"hidden_size {hidden_size} must be a multiple of num_attention_heads {num_heads}, and that of the "
                f"tensor-parallel degree {grid.tp_size}"
            )
        self.grid = grid
        self.impl: AttentionImpl = impl
        self.heads_here = num_heads // grid.tp_size
        self.head_dim = hidden_size // num_heads
        self.dropout = dropout
        self.softmax_scale = float(layer_scaling)
        self.scale = 1.0 / (math.sqrt(self.head_dim) * layer_scaling)
        how = {"multiply": linear, "device": device, "dtype": dtype}
        self.query_key_value = ColumnParallelLinear(hidden_size, 3 * hidden_size, grid, **how)
        self.rotary_emb = RotaryEmbedding(rotary_ndims, rotary_base, device) if rotary_ndims else None
        self.dense = RowParallelLinear(hidden_size, hidden_size, grid, **how)

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        cache: LayerCache | None = None,
        same_document: Tensor | None = None,
    ) -> Tensor:
        """Attend and project: x [B, S, H] -> [B, S, H]."""
        return self.dense(self.attend(x, positions, cache, same_document))

    def attend(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        cache: LayerCache | None = None,
        same_document: Tensor | None = None,
    ) -> Tensor:
        """Return the heads' outputs [B, S, N*D], before the output projection."""
        batch, length, _ = x.shape
        qkv = self.query_key_value(x).view(batch, length, self.heads_here, 3 * self.head_dim)
        q, k, v = qkv.split(self.head_dim, dim=-1)  # each [B, S, N, D]
        if self.rotary_emb is not None:
            if positions is None:
                positions = torch.arange(length, device=x.device)
            cos, sin = self.rotary_emb(positions, x.dtype)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
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
