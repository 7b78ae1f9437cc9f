"""Mamba: a recurrence with a decay for each channel and element of its state.

Source: arXiv:2312.00752, in gpt-neox's form. Each channel has a state h [D]. For token t, with step dt_t > 0 of each
channel (softplus), decays A < 0 [F, D], and vectors B_t, C_t [D] that all channels share:

    h_t = exp(dt_t A) h_(t-1) + dt_t x_t B_t            [F, D]
    y_t = h_t C_t + D x_t                               [F]

Legend: B batch, S sequence, H hidden, F channels here, D state dim, K width of the convolution, R width of the steps
before their projection, L tokens of a chunk, T tensor ranks.
"""

from __future__ import annotations

from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from neox.architecture import Architecture
from neox.architecture.mamba import CHUNK
from neox.model.cache import StateForm
from neox.model.context import BlockContext
from neox.model.mixer import CausalConvolution, Mixer, continued, fp32_parameter, without_padding
from neox.ops import linear, recurrent_kernels
from neox.parallel import (
    ColumnParallelLinear,
    ParallelGrid,
    RowParallelLinear,
    TensorOptions,
    copy_to_tensor_ranks,
    mark_decay,
    mark_split,
    reduce_over_tensor_ranks,
)


class MambaMixer(Mixer):
    """The mixer of a `mamba` block.

        hidden [H] ── in_proj ─┬─ x [F] ── conv1d, silu ─┬───────────────────────── recurrence ── y silu(z) ── out_proj
                               │                         └─ x_proj ─┬─ dt [R] ── dt_proj, softplus ─┤
                               │                                    └─ B [D], C [D] ────────────────┘
                               └─ gate z [F]

    Channels are split over tensor ranks, and `x_proj` is summed over them.
    """

    def __init__(self, architecture: Architecture, grid: ParallelGrid, **options: Unpack[TensorOptions]) -> None:
        super().__init__()
        recurrent_kernels.import_kernels("mamba", options.get("device"))
        hidden = architecture.hidden_size
        channels = architecture.mamba_width
        width = architecture.mamba_conv
        steps = architecture.mamba_dt_rank
        has_bias = architecture.mamba_linear_bias
        split = grid.tp_size > 1
        self.grid = grid
        self.channels_here = channels // grid.tp_size
        self.state_dim = architecture.mamba_state
        self.steps = steps
        decays = fp32_parameter(self.channels_here, self.state_dim, **options)
        self.A_log = mark_decay(mark_split(decays, split), False)
        self.D = mark_decay(mark_split(fp32_parameter(self.channels_here, **options), split), False)
        self.in_proj = ColumnParallelLinear(hidden, 2 * channels, grid, bias=has_bias, multiply=linear, **options)
        self.conv1d = CausalConvolution(self.channels_here, width, grid, bias=architecture.mamba_conv_bias, **options)
        self.x_proj = nn.Linear(self.channels_here, steps + 2 * self.state_dim, bias=has_bias, **options)
        self.x_proj.weight = mark_split(nn.Parameter(self.x_proj.weight), split)
        self.dt_proj = nn.Linear(steps, self.channels_here, **options)
        for parameter in self.dt_proj.parameters():
            mark_split(parameter, split)
        self.out_proj = RowParallelLinear(channels, hidden, grid, bias=has_bias, multiply=linear, **options)
        self.state_form = StateForm(((width - 1, self.channels_here), (self.channels_here, self.state_dim)))

    def between(self, projected: Tensor, context: BlockContext) -> Tensor:
        """Convolve, select, run the recurrence and gate: [B, S, 2 F] -> [B, S, F]."""
        x, gate = projected.chunk(2, dim=-1)
        x = F.silu(self.conv1d(without_padding(x, context), context))
        selected = reduce_over_tensor_ranks(linear(x, self.x_proj.weight), self.grid)
        if self.x_proj.bias is not None:
            selected = selected + self.x_proj.bias
        selected = copy_to_tensor_ranks(selected, self.grid)
        steps, b, c = selected.split((self.steps, self.state_dim, self.state_dim), dim=-1)
        raw = linear(steps, self.dt_proj.weight).float() + self.dt_proj.bias.float()
        dt = without_padding(F.softplus(raw), context)  # a step of 0 leaves the state as it is
        decay = -torch.exp(self.fp32("A_log"))
        y = self._recurrence(x.float(), dt, decay, b.float(), c.float(), context) + self.fp32("D") * x
        return (y * F.silu(gate.float())).to(projected.dtype)

    def _recurrence(self, x: Tensor, dt: Tensor, decay: Tensor, b: Tensor, c: Tensor, context: BlockContext) -> Tensor:
        """Run the recurrence in fp32, [B, S, F] -> the same; update the state in generation."""
        if context.state is None:
            if context.document_starts is None and recurrent_kernels.takes_kernel(recurrent_kernels.MAMBA, x):
                return recurrent_kernels.selective_scan(x, dt, decay, b, c)
            starts = None
            if context.document_starts is not None:
                starts = context.positions == 0
            state = x.new_zeros(x.shape[0], self.channels_here, self.state_dim)
            return selective_scan(x, dt, decay, b, c, state, starts)[0]
        return continued(one_token, selective_scan, (x, dt, b, c), decay, context.state.tensors[1])


def one_token(
    x: Tensor, dt: Tensor, decay: Tensor, b: Tensor, c: Tensor, state: Tensor, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Run the recurrence for one token; return outputs [B, F] and the new states [B, F, D].

    Args:
        x: Inputs [B, F].
        dt: Steps [B, F].
        decay: A [F, D], negative.
        b: Vectors B [B, D].
        c: Vectors C [B, D].
        state: States [B, F, D].
        out: Where to write the new states, which can be `state` itself; a new tensor if None.
    """
    kept = torch.exp(dt.unsqueeze(-1) * decay)
    state = torch.addcmul((dt * x).unsqueeze(-1) * b.unsqueeze(1), kept, state, out=out)
    return torch.matmul(state, c.unsqueeze(-1)).squeeze(-1), state


def selective_scan(
    x: Tensor,
    dt: Tensor,
    decay: Tensor,
    b: Tensor,
    c: Tensor,
    state: Tensor,
    starts: Tensor | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence over all tokens; return outputs [B, S, F] and the last states [B, F, D].

    It goes by chunks of L tokens, so that the states of a chunk stay in a CPU's cache: exponentials and products for
    the whole chunk at once, then a multiply-add for each token, then the outputs of the chunk at once. Only the states
    before each chunk are kept. The backward pass computes the others again, and goes through the tokens in reverse.
    torch.compile takes the loop over tokens as one operation.

    Args:
        x: Inputs [B, S, F].
        dt: Steps [B, S, F]; 0 for tokens that do not count.
        decay: A [F, D], negative.
        b: Vectors B [B, S, D].
        c: Vectors C [B, S, D].
        state: States before the first token [B, F, D].
        starts: Tokens that start a document, bool [B, S]: their states begin at exactly 0. None for none.
        chunk: Tokens of a chunk, L.
    """
    y, last, _ = _scan(x, dt, decay, b, c, state, starts, chunk)
    return y, last


def _states_of_chunk(
    span: slice, x: Tensor, dt: Tensor, decay: Tensor, b: Tensor, state: Tensor, starts: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return decays exp(dt A) and states [L, B, F, D], and dt x [L, B, F], of the tokens of a chunk."""
    steps = dt[:, span].transpose(0, 1)
    kept = (steps.unsqueeze(-1) * decay).exp_()  # [L, B, F, D]
    if starts is not None:
        kept.mul_(~starts[:, span].t()[..., None, None])
    inputs = steps * x[:, span].transpose(0, 1)
    states = inputs.unsqueeze(-1) * b[:, span].transpose(0, 1).unsqueeze(2)
    before = state
    for kept_here, here in zip(kept.unbind(0), states.unbind(0), strict=True):
        before = here.addcmul_(kept_here, before)
    return kept, states, inputs


@torch.library.custom_op("neox::selective_scan", mutates_args=())
def _scan(
    x: Tensor, dt: Tensor, decay: Tensor, b: Tensor, c: Tensor, state: Tensor, starts: Tensor | None, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs, the last states, and the states before each chunk, [S / L, B, F, D]."""
    outputs = []
    befores = []
    for first in range(0, x.shape[1], chunk):
        span = slice(first, first + chunk)
        befores.append(state)
        _, states, _ = _states_of_chunk(span, x, dt, decay, b, state, starts)
        outputs.append(torch.matmul(states, c[:, span].transpose(0, 1).unsqueeze(-1)).squeeze(-1))  # [L, B, F]
        state = states[-1].clone()
    return torch.cat(outputs).transpose(0, 1).contiguous(), state, torch.stack(befores)


@_scan.register_fake
def _(
    x: Tensor, dt: Tensor, decay: Tensor, b: Tensor, c: Tensor, state: Tensor, starts: Tensor | None, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    chunks = -(-x.shape[1] // chunk)
    return torch.empty_like(x), torch.empty_like(state), state.new_empty(chunks, *state.shape)


@torch.library.custom_op("neox::selective_scan_backward", mutates_args=())
def _scan_backward(
    grad: Tensor,
    grad_last: Tensor,
    x: Tensor,
    dt: Tensor,
    decay: Tensor,
    b: Tensor,
    c: Tensor,
    befores: Tensor,
    starts: Tensor | None,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x, dt, A, B, C and the first state, for those of the outputs and of the last state.

    With g_t the gradient of h_t: g_t = dy_t C_t + exp(dt_(t+1) A) g_(t+1).
    """
    grad_x, grad_dt = torch.empty_like(x), torch.empty_like(dt)
    grad_b, grad_c = torch.empty_like(b), torch.empty_like(c)
    grad_decay = torch.zeros_like(decay)
    carried = grad_last  # from the tokens behind the chunk, to its last state
    for number in range(befores.shape[0] - 1, -1, -1):
        span = slice(number * chunk, (number + 1) * chunk)
        kept, states, inputs = _states_of_chunk(span, x, dt, decay, b, befores[number], starts)
        grad_y = grad[:, span].transpose(0, 1)  # [L, B, F]
        grads = grad_y.unsqueeze(-1) * c[:, span].transpose(0, 1).unsqueeze(2)  # of the states, [L, B, F, D]
        for kept_here, here in zip(reversed(kept.unbind(0)), reversed(grads.unbind(0)), strict=True):
            here.add_(carried)
            carried = kept_here * here
        grad_c[:, span] = torch.matmul(grad_y.unsqueeze(2), states).squeeze(2).transpose(0, 1)
        # of exp(dt A), times itself: that of dt A
        of_exponent = kept.mul_(grads)
        of_exponent[0] *= befores[number]
        of_exponent[1:] *= states[:-1]
        steps = dt[:, span].transpose(0, 1)
        grad_decay += (of_exponent * steps.unsqueeze(-1)).sum((0, 1))
        of_inputs = torch.matmul(grads, b[:, span].transpose(0, 1).unsqueeze(-1)).squeeze(-1)  # of dt x, [L, B, F]
        grad_b[:, span] = torch.matmul(inputs.unsqueeze(2), grads).squeeze(2).transpose(0, 1)
        of_steps = (of_exponent * decay).sum(-1) + of_inputs * x[:, span].transpose(0, 1)
        grad_dt[:, span] = of_steps.transpose(0, 1)
        grad_x[:, span] = (of_inputs * steps).transpose(0, 1)
        del kept, states, grads, of_exponent, kept_here, here  # before those of the next chunk are made
    return grad_x, grad_dt, grad_decay, grad_b, grad_c, carried.clone()


@_scan_backward.register_fake
def _(
    grad: Tensor,
    grad_last: Tensor,
    x: Tensor,
    dt: Tensor,
    decay: Tensor,
    b: Tensor,
    c: Tensor,
    befores: Tensor,
    starts: Tensor | None,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    first = grad_last
    return tuple(torch.empty_like(tensor) for tensor in (x, dt, decay, b, c, first))  # type: ignore[return-value]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, dt, decay, b, c, _, starts, chunk = inputs
    ctx.save_for_backward(x, dt, decay, b, c, output[2], starts)
    ctx.chunk = chunk


def _gradients(ctx: Any, grad: Tensor, grad_last: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    *saved, befores, starts = ctx.saved_tensors
    found = _scan_backward(grad, grad_last, *saved, befores, starts, ctx.chunk)
    return (*found, None, None)


_scan.register_autograd(_gradients, setup_context=_keep)
