"""One transformer block: attention and MLP around a residual stream, sequential or parallel.

Legend: B batch, S sequence, H hidden.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from neox.model.attention import SelfAttention
from neox.model.cache import LayerCache
from neox.ops import gelu, gelu_tanh, linear
from neox.parallel import ColumnParallelLinear, ParallelGrid, RowParallelLinear, reduce_over_tensor_ranks


class MLP(nn.Module):
    """H -> 4H -> H with GELU between; the wide dimension is split over tensor ranks.

    tanh_gelu: the tanh approximation (NeoX's `bias_gelu_fusion`) instead of the erf form.
    """

    def __init__(
        self,
        hidden_size: int,
        grid: ParallelGrid,
        *,
        tanh_gelu: bool,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.activation = gelu_tanh if tanh_gelu else gelu
        how = {"multiply": linear, "device": device, "dtype": dtype}
        self.dense_h_to_4h = ColumnParallelLinear(hidden_size, 4 * hidden_size, grid, **how)
        self.dense_4h_to_h = RowParallelLinear(4 * hidden_size, hidden_size, grid, **how)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense_4h_to_h(self.expand(x))

    def expand(self, x: Tensor) -> Tensor:
        """Return the wide activations [B, S, 4H/tp], before the output projection."""
        return self.activation(self.dense_h_to_4h(x))


class TransformerLayer(nn.Module):
    """A block: hidden states [B, S, H] -> [B, S, H].

    parallel_residual (NeoX's `gpt_j_residual`): x + attention(ln1(x)) + mlp(ln2(x)), with one all-reduce for both;
    otherwise attention first, then the MLP on its result. hidden_dropout applies to what is added to the residual.
    """

    def __init__(
        self,
        attention: SelfAttention,
        mlp: MLP,
        hidden_size: int,
        grid: ParallelGrid,
        *,
        parallel_residual: bool,
        hidden_dropout: float = 0.0,
        layernorm_epsilon: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.grid = grid
        self.parallel_residual = parallel_residual
        self.hidden_dropout = hidden_dropout
        norm = {"eps": layernorm_epsilon, "device": device, "dtype": dtype}
        self.input_layernorm = nn.LayerNorm(hidden_size, **norm)
        self.attention = attention
        self.post_attention_layernorm = nn.LayerNorm(hidden_size, **norm)
        self.mlp = mlp

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        cache: LayerCache | None = None,
        same_document: Tensor | None = None,
    ) -> Tensor:
        """positions: [S] or [B, S], 0..S-1 if None. cache: keys and values seen before, in generation. same_document:
        bool [B, 1, S, S], which pairs see each other, all earlier ones if None."""
        if self.parallel_residual and self.grid.tp_size > 1:
            return self._parallel_split(x, positions, cache, same_document)
        p = self.hidden_dropout
        attended = F.dropout(self.attention(self.input_layernorm(x), positions, cache, same_document), p, self.training)
        if self.parallel_residual:
            return x + attended + F.dropout(self.mlp(self.post_attention_layernorm(x)), p, self.training)
        x = x + attended
        return x + F.dropout(self.mlp(self.post_attention_layernorm(x)), p, self.training)

    def _parallel_split(
        self, x: Tensor, positions: Tensor | None, cache: LayerCache | None, same_document: Tensor | None
    ) -> Tensor:
        """The parallel residual on several tensor ranks: both partial outputs travel in one all-reduce.

        Dropout multiplies the summands by the mask of their sum, which is drawn alike on all ranks.
        """
        attention, mlp = self.attention, self.mlp
        attended = attention.dense.partial(attention.attend(self.input_layernorm(x), positions, cache, same_document))
        expanded = mlp.dense_4h_to_h.partial(mlp.expand(self.post_attention_layernorm(x)))
        bias_a, bias_m = attention.dense.bias, mlp.dense_4h_to_h.bias
        if self.training and self.hidden_dropout > 0.0:
            ones = torch.ones_like(x)
            mask_a, mask_m = F.dropout(ones, self.hidden_dropout), F.dropout(ones, self.hidden_dropout)
            attended, expanded = attended * mask_a, expanded * mask_m
            bias_a, bias_m = bias_a * mask_a, bias_m * mask_m
        return x + reduce_over_tensor_ranks(attended + expanded, self.grid) + (bias_a + bias_m)
