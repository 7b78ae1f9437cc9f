"""Blocks of gMLP (arXiv:2105.08050), which have a gate over the sequence instead of attention, as in gpt-neox.

Legend: B batch, S sequence, H hidden, F = 4H, per tensor rank where stated, P longest sequence.
"""

from __future__ import annotations

from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from neox.architecture import Architecture
from neox.errors import NeoXError
from neox.model.block import Block
from neox.model.context import Aux, BlockContext
from neox.ops import ACTIVATIONS, VisiblePairs, build_norm, linear
from neox.parallel import (
    ColumnParallelLinear,
    ParallelGrid,
    RowParallelLinear,
    TensorOptions,
    gather_last_dim,
    scatter_last_dim,
)


class TinyAttention(nn.Module):
    """Causal attention with one narrow head (`amlp`), whole on every tensor rank: [B, S, 2F] -> [B, S, F]."""

    def __init__(self, inner: int, width: int, **options: Unpack[TensorOptions]) -> None:
        super().__init__()
        self.proj_qkv = nn.Linear(2 * inner, 3 * width, **options)
        self.proj_ffn = nn.Linear(width, inner, **options)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Attend to earlier tokens, or to the pairs of `mask` [B, 1, S, S]."""
        q, k, v = linear(x, self.proj_qkv.weight, self.proj_qkv.bias).unsqueeze(1).chunk(3, dim=-1)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return linear(attended.squeeze(1), self.proj_ffn.weight, self.proj_ffn.bias)


class SpatialGatingUnit(nn.Module):
    """Multiplies half of the activations by a gate that a causal matrix over positions computes from the other half.

    The gate's norm needs all features. So every tensor rank computes the whole gate, with copies of its parameters.
    """

    def __init__(self, architecture: Architecture, kind: str, grid: ParallelGrid, **options: Unpack[TensorOptions]):
        super().__init__()
        inner = 4 * architecture.hidden_size
        length = architecture.max_positions
        self.grid = grid
        self.norm = build_norm(architecture, inner, **options)
        self.proj = nn.Linear(length, length, **options)
        self.attn = TinyAttention(inner, architecture.gmlp_width, **options) if kind == "amlp" else None

    def forward(self, x: Tensor, positions: Tensor, visible: Tensor | None) -> Tensor:
        """Gate the activations: [B, S, 2F/tp] -> [B, S, F/tp].

        Args:
            x: Values, then what the gate is computed from.
            positions: Positions of the tokens, [S] or [B, S].
            visible: Pairs of tokens in one document, bool [B, 1, S, S]; None for one document per row.
        """
        value, gate = x.chunk(2, dim=-1)
        whole = gather_last_dim(gate, self.grid)  # [B, S, F]
        attended = None
        if self.attn is not None:
            attended = self.attn(torch.cat([gather_last_dim(value, self.grid), whole], dim=-1), visible)
        whole = self._over_positions(self.norm(whole), positions, visible)
        if attended is not None:
            whole = whole + attended
        return value * scatter_last_dim(whole, self.grid)

    def _over_positions(self, gate: Tensor, positions: Tensor, visible: Tensor | None) -> Tensor:
        length = gate.shape[1]
        if length > self.proj.weight.shape[0]:
            raise NeoXError(
                f"the network gates over {self.proj.weight.shape[0]} positions (seq_length), and this sequence has "
                f"{length}; give a shorter one"
            )
        if visible is None:
            weight = self.proj.weight[:length, :length].tril()
            bias = self.proj.bias[:length]
        else:  # positions start anew in each document
            weight = self.proj.weight[positions.unsqueeze(-1), positions.unsqueeze(-2)]  # [B, S, S]
            weight = weight.masked_fill(~visible.squeeze(1), 0.0)
            bias = self.proj.bias[positions]
        return torch.matmul(weight, gate) + bias.unsqueeze(-1)


class GatedMLPLayer(Block):
    """A block `gmlp` or `amlp`: hidden states [B, S, H] -> [B, S, H], without a residual connection, as in gpt-neox.

    gpt-neox's files hold biases of the two linear layers, but gpt-neox never adds them. Here they stay zero.

    Args:
        architecture: The network.
        number: Number of the block, from 0.
        grid: Process groups.
        **options: Device and type of the parameters.
    """

    def __init__(
        self, architecture: Architecture, number: int, grid: ParallelGrid, **options: Unpack[TensorOptions]
    ) -> None:
        super().__init__()
        hidden = architecture.hidden_size
        self.grid = grid
        self.attention = None
        self.norm = build_norm(architecture, **options)
        self.input_linear = ColumnParallelLinear(hidden, 8 * hidden, grid, multiply=linear, **options)
        self.activation = ACTIVATIONS[architecture.activation]
        self.sgu = SpatialGatingUnit(architecture, architecture.attention[number], grid, **options)
        self.output_linear = RowParallelLinear(4 * hidden, hidden, grid, multiply=linear, **options)

    def forward(self, x: Tensor, context: BlockContext) -> tuple[Tensor, Aux]:
        """Run the block: [B, S, H] -> [B, S, H]. It adds no losses to the objective's."""
        assert context.cache is None, "refused by KVCache"
        inner = self.activation(self.input_linear(self.norm(x)))
        visible = None
        if context.document_starts is not None:
            visible = VisiblePairs(inner.shape[1], inner.device, context.document_starts).dense()
        return self.output_linear(self.sgu(inner, context.positions, visible)), {}

    def parameters_on_shares(self) -> list[nn.Parameter]:
        """Return the norm's parameters."""
        return list(self.norm.parameters())
