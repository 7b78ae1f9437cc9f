"""Gated DeltaNet: linear attention whose state moves towards each new value, and fades.

Source: arXiv:2412.06464, as in Qwen3-Next and OLMo's hybrids. The rule itself is in `neox.ops.gated_delta`.

Legend: B batch, S sequence, H hidden; G heads of queries and keys and N heads of values here, K width of a key, V width
of a value, C = 2 G K + N V channels of the convolution here.
"""

from __future__ import annotations

from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from neox.architecture import Architecture
from neox.model.cache import StateForm
from neox.model.context import BlockContext
from neox.model.mixer import CausalConvolution, Mixer, fp32_parameter, without_padding
from neox.ops import gated_delta_recurrence, gated_delta_scan, linear, recurrent_kernels
from neox.parallel import (
    ColumnParallelLinear,
    ParallelGrid,
    RowParallelLinear,
    TensorOptions,
    copy_to_tensor_ranks,
    mark_decay,
    mark_split,
)


class GatedDeltaMixer(Mixer):
    """The mixer of a `gated_delta` block.

        hidden [H] ── in_proj ─┬─ q [G K] ┐
                               ├─ k [G K] ├─ conv1d, silu ─ delta rule ─ norm(y) silu(z) ── out_proj ── [H]
                               ├─ v [N V] ┘                   │  │
                               ├─ gate z [N V]                │  │
                               ├─ b [N] ── sigmoid(b) ─ strength │
                               └─ a [N] ── exp(-exp(A_log) softplus(a + dt_bias)) ─ decay

    Heads are split over tensor ranks. Strengths are between 0 and 2 with `linear_negative_eigenvalues`.
    """

    def __init__(self, architecture: Architecture, grid: ParallelGrid, **options: Unpack[TensorOptions]) -> None:
        super().__init__()
        recurrent_kernels.import_kernels("gated_delta", options.get("device"))
        hidden = architecture.hidden_size
        heads = architecture.linear_value_heads
        keys = architecture.linear_key_heads * architecture.linear_key_dim
        values = heads * architecture.linear_value_dim
        split = grid.tp_size > 1
        self.grid = grid
        self.key_dim = architecture.linear_key_dim
        self.value_dim = architecture.linear_value_dim
        self.keys_here = keys // grid.tp_size
        self.values_here = values // grid.tp_size
        self.most_strength = 2.0 if architecture.linear_negative_eigenvalues else 1.0
        rows = 2 * (keys + values + heads)
        self.in_proj = ColumnParallelLinear(hidden, rows, grid, bias=False, multiply=linear, **options)
        channels = 2 * self.keys_here + self.values_here
        self._widths = (channels, self.values_here, 2 * heads // grid.tp_size)
        self.conv1d = CausalConvolution(channels, architecture.linear_conv, grid, bias=False, **options)

        def per_head() -> nn.Parameter:
            return mark_decay(mark_split(fp32_parameter(heads // grid.tp_size, **options), split), False)

        self.dt_bias = per_head()
        self.A_log = per_head()
        self.norm = GatedHeadNorm(self.value_dim, grid, eps=architecture.linear_norm_epsilon, **options)
        self.out_proj = RowParallelLinear(values, hidden, grid, bias=False, multiply=linear, **options)
        self.state_form = StateForm(
            ((architecture.linear_conv - 1, channels), (heads // grid.tp_size, self.key_dim, self.value_dim))
        )

    def between(self, projected: Tensor, context: BlockContext) -> Tensor:
        """Compute convolution, delta rule, norm and gate: [B, S, 2 G K + 2 N V + 2 N] -> [B, S, N V]."""
        mixed, gate, numbers = projected.split(self._widths, dim=-1)
        convolved = F.silu(self.conv1d(without_padding(mixed, context), context))
        queries, keys, values = convolved.split((self.keys_here, self.keys_here, self.values_here), dim=-1)
        queries = queries.unflatten(-1, (-1, self.key_dim))
        keys = keys.unflatten(-1, (-1, self.key_dim))
        values = values.unflatten(-1, (-1, self.value_dim))

        # Padding writes nothing, and nothing fades there.
        b, a = numbers.float().chunk(2, dim=-1)  # [B, S, N]
        strength = without_padding(b.sigmoid() * self.most_strength, context)
        log_decay = without_padding(-self.fp32("A_log").exp() * F.softplus(a + self.fp32("dt_bias")), context)
        if context.state is None:
            y, _ = gated_delta_scan(queries, keys, values, log_decay, strength, starts=context.document_starts)
        else:
            state = context.state.tensors[1]
            rule = gated_delta_recurrence if values.shape[1] == 1 else gated_delta_scan
            y, last = rule(queries, keys, values, log_decay, strength, state)
            state.copy_(last)
        return self.norm(y, gate.unflatten(-1, (-1, self.value_dim))).flatten(2)


class GatedHeadNorm(nn.Module):
    """RMSNorm of each head, multiplied by silu(gate): [B, S, N, V] -> the same shape.

    Args:
        width: Width of a head, V.
        grid: Process groups. Heads are split over tensor ranks; all share one scale.
        eps: Summand of the mean of the squares.
        **options: Device and type of the parameters.
    """

    def __init__(self, width: int, grid: ParallelGrid, *, eps: float, **options: Unpack[TensorOptions]) -> None:
        super().__init__()
        self.grid = grid
        self.eps = eps
        self.scale = nn.Parameter(torch.ones(width, **options))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Normalise and gate heads."""
        scale = copy_to_tensor_ranks(self.scale, self.grid)
        return F.rms_norm(x, scale.shape, scale, self.eps) * F.silu(gate)
