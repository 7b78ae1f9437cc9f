"""RWKV 6: time mixing by a recurrence with a decay of each channel, then channel mixing, as in gpt-neox.

Source: arXiv:2404.05892, whose version 6 is called Finch. Both mixings see each token x_t next to the one before it:

    mixture(m)_t = x_t + (x_(t-1) - x_t) m

In time mixing m depends on both tokens, for each of r, k, v, g and w. A head has a state S [K, K]. With the bonus u,

    y_t = r_t (S_(t-1) + diag(u) k_t v_t)          S_t = diag(exp(-exp(w_t))) S_(t-1) + k_t v_t

The recurrence itself is in `neox.ops.wkv`.

Legend: B batch, S sequence, H hidden, N heads here, K channels of a head, A = N K channels here, F width of channel
mixing here.
"""

from __future__ import annotations

from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from neox.architecture import Architecture
from neox.architecture.rwkv import DECAY_WIDTH, MIX_WIDTH, rwkv_state
from neox.model.block import Block, scaled_and_dropped
from neox.model.cache import StateForm
from neox.model.context import Aux, BlockContext
from neox.model.mixer import without_padding
from neox.ops import linear, recurrent_kernels, wkv_recurrence, wkv_scan
from neox.parallel import (
    ColumnParallelLinear,
    ParallelGrid,
    RowParallelLinear,
    TensorOptions,
    copy_to_tensor_ranks,
    gather_last_dim,
    mark_split,
    recomputed,
)

_HEAD_EPSILON = 64e-5
"""Epsilon of the norm of heads, as in gpt-neox: 1e-5 times the square of 8."""


class RWKVLayer(Block):
    """A block `rwkv`: hidden states [B, S, H] -> [B, S, H].

        x ─ (first block: ln1) ─┬─ ln1 ─ time mixing ─ + ─┬─ ln2 ─ channel mixing ─ + ─
                                └───────────────────── ┘  └──────────────────────── ┘

    As in gpt-neox, the first block normalises the embedding by the same ln1.

    Args:
        architecture: The network.
        number: Number of the block, from 0.
        grid: Process groups.
        hidden_dropout: Dropout probability of what is added to the residual stream.
        **options: Device and type of the parameters.
    """

    def __init__(
        self,
        architecture: Architecture,
        number: int,
        grid: ParallelGrid,
        *,
        hidden_dropout: float = 0.0,
        **options: Unpack[TensorOptions],
    ) -> None:
        super().__init__()
        self.grid = grid
        self.attention = None
        self.hidden_dropout = hidden_dropout
        self.residual_multiplier = architecture.residual_multiplier
        self.is_first = number == 0
        self.ln1 = nn.LayerNorm(architecture.hidden_size, **options)
        self.ln2 = nn.LayerNorm(architecture.hidden_size, **options)
        self.att = TimeMixing(architecture, grid, **options)
        self.ffn = ChannelMixing(architecture, grid, **options)
        self._state_form = StateForm(rwkv_state(architecture, grid.tp_size))

    @property
    def cache_form(self) -> StateForm:
        """The last normalised token before either mixing, and the state of the recurrence."""
        return self._state_form

    def forward(self, x: Tensor, context: BlockContext) -> tuple[Tensor, Aux]:
        """Run the block. It adds no losses to the objective's."""
        if self.is_first:
            x = self.ln1(x)
        x = x + self._contribution(self.att(self.ln1(x), context))
        return x + self._contribution(self.ffn(self.ln2(x), context)), {}

    def _contribution(self, x: Tensor) -> Tensor:
        return scaled_and_dropped(x, self.residual_multiplier, self.hidden_dropout, training=self.training)


class TimeMixing(nn.Module):
    """The recurrence over tokens: [B, S, H] -> [B, S, H], with heads split over tensor ranks.

        x ─ five mixtures ─┬─ receptance ── r ─┐
                           ├─ key ───────── k ─┤
                           ├─ value ─────── v ─┼─ recurrence ─ ln_x of each head ─ y silu(g) ─ output ─ [H]
                           ├─ decay, small ─ w ┘                                      │
                           └─ gate ──────── g ────────────────────────────────────────┘

    Training keeps the mixtures and the results of the products; it computes the rest again in the backward pass.
    """

    def __init__(self, architecture: Architecture, grid: ParallelGrid, **options: Unpack[TensorOptions]) -> None:
        super().__init__()
        recurrent_kernels.import_kernels("rwkv", options.get("device"))
        hidden = architecture.hidden_size
        width = architecture.rwkv_width
        self.grid = grid
        self.heads_here = architecture.rwkv_heads // grid.tp_size
        here = width // grid.tp_size

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, **options))

        def split(*shape: int) -> nn.Parameter:
            return mark_split(parameter(*shape), grid.tp_size > 1)

        self.time_maa_x = parameter(1, 1, hidden)
        self.time_maa_w = parameter(1, 1, hidden)
        self.time_maa_k = parameter(1, 1, hidden)
        self.time_maa_v = parameter(1, 1, hidden)
        self.time_maa_r = parameter(1, 1, hidden)
        self.time_maa_g = parameter(1, 1, hidden)
        self.time_maa_w1 = parameter(hidden, 5 * MIX_WIDTH)
        self.time_maa_w2 = parameter(5, MIX_WIDTH, hidden)
        self.time_decay = split(1, 1, here)
        self.time_decay_w1 = parameter(hidden, DECAY_WIDTH)
        self.time_decay_w2 = split(DECAY_WIDTH, here)
        self.time_faaaa = split(self.heads_here, width // architecture.rwkv_heads)
        self.receptance = ColumnParallelLinear(hidden, width, grid, bias=False, multiply=linear, **options)
        self.key = ColumnParallelLinear(hidden, width, grid, bias=False, multiply=linear, **options)
        self.value = ColumnParallelLinear(hidden, width, grid, bias=False, multiply=linear, **options)
        self.output = RowParallelLinear(width, hidden, grid, bias=False, multiply=linear, **options)
        self.gate = ColumnParallelLinear(hidden, width, grid, bias=False, multiply=linear, **options)
        self.ln_x = nn.GroupNorm(self.heads_here, here, **options)  # only its parameters: `_between` computes it
        for scale_or_bias in self.ln_x.parameters():
            mark_split(scale_or_bias, grid.tp_size > 1)

    def forward(self, x: Tensor, context: BlockContext) -> Tensor:
        """Mix normalised hidden states."""
        in_training = context.state is None and torch.is_grad_enabled()
        mixtures = recomputed(self._mixtures, x, context) if in_training else self._mixtures(x, context)
        for_decays, for_keys, for_values, for_receptances, for_gates = mixtures
        inner = copy_to_tensor_ranks(torch.tanh(for_decays @ self.time_decay_w1), self.grid)
        parts = (
            self.receptance(for_receptances),
            self.key(for_keys),
            self.value(for_values),
            inner @ self.time_decay_w2,
            self.gate(for_gates),
        )
        if in_training:
            return self.output(recomputed(self._between, *parts, context))
        return self.output(self._between(*parts, context))

    def _mixtures(self, x: Tensor, context: BlockContext) -> tuple[Tensor, ...]:
        """Return what decays, keys, values, receptances and gates are computed from, [B, S, H] each."""
        difference = earlier_token(x, context, 0) - x
        first = x + difference * self.time_maa_x
        shifts = torch.tanh(first @ self.time_maa_w1).unflatten(-1, (5, -1))  # [B, S, 5, 32]
        bases = (self.time_maa_w, self.time_maa_k, self.time_maa_v, self.time_maa_r, self.time_maa_g)
        mixtures = []
        for number, base in enumerate(bases):
            weights = base + shifts[:, :, number] @ self.time_maa_w2[number]  # [B, S, H]
            mixtures.append(x + difference * weights)
        return tuple(mixtures)

    def _between(self, r: Tensor, k: Tensor, v: Tensor, shift: Tensor, gate: Tensor, context: BlockContext) -> Tensor:
        """Compute recurrence, norm and gate: [B, S, A] each -> [B, S, A].

        Args:
            r: Receptances.
            k: Keys.
            v: Values.
            shift: What is added to `time_decay`.
            gate: Gates g.
            context: Documents, and in generation the state.
        """
        # Padding adds nothing, and nothing fades there.
        wide = torch.promote_types(shift.dtype, torch.float32)
        log_decay = without_padding(-torch.exp(self.time_decay.to(wide) + shift.to(wide)), context)
        k = without_padding(k, context)
        receptances, keys, values, decays = (part.unflatten(-1, (self.heads_here, -1)) for part in (r, k, v, log_decay))
        if context.state is None:
            y, _ = wkv_scan(receptances, keys, values, decays, self.time_faaaa, starts=context.document_starts)
        else:
            state = context.state.tensors[2]
            rule = wkv_recurrence if r.shape[1] == 1 else wkv_scan
            y, last = rule(receptances, keys, values, decays, self.time_faaaa, state)
            state.copy_(last)
        normalised = F.layer_norm(y, y.shape[-1:], eps=_HEAD_EPSILON).flatten(2)
        scaled = normalised * self.ln_x.weight + self.ln_x.bias
        return scaled.to(gate.dtype) * F.silu(gate)


class ChannelMixing(nn.Module):
    """The MLP of RWKV: sigmoid(R x) V relu(K x)^2, of mixtures of each token with the one before it."""

    def __init__(self, architecture: Architecture, grid: ParallelGrid, **options: Unpack[TensorOptions]) -> None:
        super().__init__()
        hidden = architecture.hidden_size
        inner = architecture.rwkv_mlp_width
        self.grid = grid
        self.time_maa_k = nn.Parameter(torch.empty(1, 1, hidden, **options))
        self.time_maa_r = nn.Parameter(torch.empty(1, 1, hidden, **options))
        self.key = ColumnParallelLinear(hidden, inner, grid, bias=False, multiply=linear, **options)
        self.receptance = ColumnParallelLinear(hidden, hidden, grid, bias=False, multiply=linear, **options)
        self.value = RowParallelLinear(inner, hidden, grid, bias=False, multiply=linear, **options)

    def forward(self, x: Tensor, context: BlockContext) -> Tensor:
        """Mix normalised hidden states [B, S, H]."""
        in_training = context.state is None and torch.is_grad_enabled()
        mixtures = recomputed(self._mixtures, x, context) if in_training else self._mixtures(x, context)
        for_keys, for_receptances = mixtures
        inner = torch.relu(self.key(for_keys)).square()
        receptances = gather_last_dim(self.receptance(for_receptances), self.grid)
        return torch.sigmoid(receptances) * self.value(inner)

    def _mixtures(self, x: Tensor, context: BlockContext) -> tuple[Tensor, Tensor]:
        """Return what keys and receptances are computed from, [B, S, H] each."""
        difference = earlier_token(x, context, 1) - x
        return x + difference * self.time_maa_k, x + difference * self.time_maa_r


def earlier_token(x: Tensor, context: BlockContext, index: int) -> Tensor:
    """Return the token before each one, [B, S, H]; zeros before the first token of a document.

    Args:
        x: Normalised hidden states [B, S, H].
        context: Positions, and in generation the state.
        index: Which tensor of the state holds the last token, which is replaced.
    """
    if context.state is None:
        before = F.pad(x[:, :-1], (0, 0, 1, 0))
        if context.document_starts is not None:
            before = before * (context.positions > 0).unsqueeze(-1)
        return before
    x = without_padding(x, context)
    last = context.state.tensors[index]
    before = torch.cat((last.unsqueeze(1).to(x.dtype), x[:, :-1]), dim=1)
    last.copy_(x[:, -1])
    return before
