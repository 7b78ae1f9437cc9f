"""Mamba-2: a recurrence with a scalar decay per head, whose chunks of tokens are products of matrices.

Source: arXiv:2405.21060. Each head has a state h [P, D], a matrix for its P channels. For token t, with step dt_t > 0
(softplus), decay A < 0 per head, and vectors B_t, C_t [D] that a group of heads shares:

    h_t = exp(dt_t A) h_(t-1) + dt_t x_t B_t^T          [P, D]
    y_t = h_t C_t + D x_t                               [P]

Legend: B batch, S sequence, H hidden, N heads here, P channels of a head, F = N P channels here, G groups here, D state
dim, K width of the convolution, T tensor ranks, c chunks of L tokens.
"""

from __future__ import annotations

from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from neox.architecture import Architecture
from neox.architecture.mamba2 import CHUNK, EPSILON
from neox.model.cache import StateForm
from neox.model.context import BlockContext
from neox.model.mixer import CausalConvolution, Mixer, continued, fp32_parameter, without_padding
from neox.ops import StateScan, in_chunks, linear, recurrent_kernels, starts_in_chunks
from neox.parallel import (
    ColumnParallelLinear,
    ParallelGrid,
    RowParallelLinear,
    TensorOptions,
    copy_to_tensor_ranks,
    gather_last_dim,
    mark_decay,
    mark_split,
    reduce_over_tensor_ranks,
)


class Mamba2Mixer(Mixer):
    """The mixer of a `mamba2` block.

        hidden [H] ── in_proj ─┬─ gate z [F] ─────────────────────────────────┐
                               ├─ x [F]   ┐                                   │
                               ├─ B [G D] ├─ conv1d, silu ─ recurrence ─ norm(y silu(z)) ── out_proj ── [H]
                               ├─ C [G D] ┘                    │
                               └─ dt [N] ── softplus(dt + dt_bias)

    Heads are split over tensor ranks. Groups are, too, if there are enough; one group's B and C are computed in parts,
    which are joined after the convolution.
    """

    def __init__(self, architecture: Architecture, grid: ParallelGrid, **options: Unpack[TensorOptions]) -> None:
        super().__init__()
        recurrent_kernels.import_kernels("mamba2", options.get("device"))
        hidden = architecture.hidden_size
        heads = architecture.mamba_heads
        channels = heads * architecture.mamba_head_dim
        states = architecture.mamba_groups * architecture.mamba_state
        has_bias = architecture.mamba_linear_bias
        split = grid.tp_size > 1
        self.grid = grid
        self.heads_here = heads // grid.tp_size
        self.channels_here = channels // grid.tp_size
        self.states_here = states // grid.tp_size
        self.head_dim = architecture.mamba_head_dim
        self.state_dim = architecture.mamba_state
        self.joins_groups = architecture.mamba_groups % grid.tp_size != 0
        self.groups = architecture.mamba_groups if self.joins_groups else architecture.mamba_groups // grid.tp_size

        def per_head() -> nn.Parameter:
            return mark_decay(mark_split(fp32_parameter(self.heads_here, **options), split), False)

        self.dt_bias = per_head()
        self.A_log = per_head()
        self.D = per_head()
        rows = 2 * channels + 2 * states + heads
        self.in_proj = ColumnParallelLinear(hidden, rows, grid, bias=has_bias, multiply=linear, **options)
        self.conv1d = CausalConvolution(
            self.channels_here + 2 * self.states_here,
            architecture.mamba_conv,
            grid,
            bias=architecture.mamba_conv_bias,
            **options,
        )
        self.norm = GatedGroupNorm(
            self.channels_here,
            self.groups,
            grid,
            over_ranks=self.joins_groups,
            eps=architecture.norm_epsilon or EPSILON,
            **options,
        )
        self.out_proj = RowParallelLinear(channels, hidden, grid, bias=has_bias, multiply=linear, **options)
        convolved = self.channels_here + 2 * self.states_here
        self.state_form = StateForm(
            ((architecture.mamba_conv - 1, convolved), (self.heads_here, self.head_dim, self.state_dim))
        )

    def between(self, projected: Tensor, context: BlockContext) -> Tensor:
        """Convolve, run the recurrence, gate and normalise: [B, S, 2 F + 2 G D + N] -> [B, S, F]."""
        states = self.states_here
        gate, inner, steps = projected.split(
            (self.channels_here, self.channels_here + 2 * states, self.heads_here), dim=-1
        )
        inner = F.silu(self.conv1d(without_padding(inner, context), context))
        values, b, c = inner.split((self.channels_here, states, states), dim=-1)
        if self.joins_groups:
            joined = torch.cat((b, c), dim=-1).unflatten(-1, (2, states))
            b, c = copy_to_tensor_ranks(gather_last_dim(joined, self.grid), self.grid).unbind(-2)
        values = values.unflatten(-1, (self.heads_here, self.head_dim))
        b = b.unflatten(-1, (self.groups, self.state_dim))
        c = c.unflatten(-1, (self.groups, self.state_dim))
        # A step of 0 leaves the state as it is.
        dt = without_padding(F.softplus(steps.float() + self.fp32("dt_bias")), context)
        y = self._recurrence(values, dt, -torch.exp(self.fp32("A_log")), b, c, context)
        y = torch.addcmul(y, self.fp32("D").unsqueeze(-1), values)
        return self.norm(y.flatten(-2), gate)

    def _recurrence(
        self, values: Tensor, dt: Tensor, decay: Tensor, b: Tensor, c: Tensor, context: BlockContext
    ) -> Tensor:
        """Run the recurrence in fp32, [B, S, N, P] -> the same; update the state in generation."""
        if context.state is None:
            return chunked_scan(values, dt, decay, b, c, None, context.document_starts)[0]
        return continued(one_token, chunked_scan, (values, dt, b, c), decay, context.state.tensors[1])


class GatedGroupNorm(nn.Module):
    """RMSNorm of y silu(z) over the channels of each group: y [B, S, F], z [B, S, F] -> [B, S, F].

    Args:
        channels: Number of channels on this rank.
        groups: Number of groups on this rank.
        grid: Process groups.
        over_ranks: Whether the channels of the only group are those of all tensor ranks.
        eps: Summand of the mean of the squares.
        **options: Device and type of the scale.
    """

    def __init__(
        self,
        channels: int,
        groups: int,
        grid: ParallelGrid,
        *,
        over_ranks: bool,
        eps: float,
        **options: Unpack[TensorOptions],
    ) -> None:
        super().__init__()
        self.grid = grid
        self.groups = groups
        self.over_ranks = over_ranks
        self.eps = eps
        self.scale = mark_decay(mark_split(nn.Parameter(torch.ones(channels, **options)), grid.tp_size > 1), False)

    def forward(self, y: Tensor, gate: Tensor) -> Tensor:
        """Normalise in fp32; the result has the type of the gate."""
        grouped = (y * F.silu(gate.float())).unflatten(-1, (self.groups, -1))
        total = torch.linalg.vector_norm(grouped, dim=-1, keepdim=True).square()  # without a tensor of squares
        channels = grouped.shape[-1]
        if self.over_ranks:
            total = copy_to_tensor_ranks(reduce_over_tensor_ranks(total, self.grid), self.grid)
            channels *= self.grid.tp_size
        normed = grouped * torch.rsqrt(total / channels + self.eps)
        return self.scale * normed.flatten(-2).to(gate.dtype)


def one_token(
    x: Tensor, dt: Tensor, decay: Tensor, b: Tensor, c: Tensor, state: Tensor, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Run the recurrence for one token; return outputs [B, N, P] and the new states [B, N, P, D], fp32.

    Args:
        x: Inputs [B, N, P].
        dt: Steps [B, N], fp32.
        decay: A [N], negative, fp32.
        b: Vectors B [B, G, D].
        c: Vectors C [B, G, D].
        state: States [B, N, P, D], fp32.
        out: Where to write the new states, which can be `state` itself; a new tensor if None.
    """
    heads = x.shape[1] // b.shape[1]
    b = b.float().repeat_interleave(heads, dim=1)
    c = c.float().repeat_interleave(heads, dim=1)
    kept = torch.exp(dt * decay)[..., None, None]
    added = (x.float() * dt.unsqueeze(-1)).unsqueeze(-1) * b.unsqueeze(-2)
    state = torch.addcmul(added, kept, state, out=out)
    return torch.matmul(state, c.unsqueeze(-1)).squeeze(-1), state


def chunked_scan(
    x: Tensor,
    dt: Tensor,
    decay: Tensor,
    b: Tensor,
    c: Tensor,
    state: Tensor | None,
    document_starts: Tensor | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence for all tokens at once; return outputs [B, S, N, P] and the last states [B, N, P, D], fp32.

    In a chunk of L tokens, with a_t = dt_t A summed up to s_t, token i reads

        sum over j <= i of exp(s_i - s_j) (C_i B_j) dt_j x_j      products of pairs of tokens
        + exp(s_i) h C_i                                          the state h before the chunk

    and the chunk leaves exp(s_L) h + sum over j of exp(s_L - s_j) dt_j x_j B_j^T. Only that goes from chunk to chunk.

    Documents in one row: every sum leaves out other documents' tokens by factors of exactly 0, and s counts from the
    first token of each document. So no bit of a document depends on its neighbours.

    Args:
        x: Inputs [B, S, N, P].
        dt: Steps [B, S, N], fp32; 0 for tokens that do not count.
        decay: A [N], negative, fp32.
        b: Vectors B [B, S, G, D].
        c: Vectors C [B, S, G, D].
        state: States before the first token [B, N, P, D], fp32; None for zeros.
        document_starts: Index in the row at which each token's document starts, [B, S]; None for one document a row.
        chunk: Tokens of a chunk, L.
    """
    if recurrent_kernels.takes_kernel(recurrent_kernels.MAMBA, x) and x.element_size() == 2:
        return recurrent_kernels.chunked_scan(x, dt, decay, b, c, state, document_starts)
    batch, length, heads, head_dim = x.shape
    groups = b.shape[2]
    in_group = heads // groups
    x, dt, b, c = (in_chunks(tensor.float(), chunk) for tensor in (x, dt, b, c))  # [B, c, L, ...]
    x = x * dt.unsqueeze(-1)  # dt x, [B, c, L, N, P]
    steps = (dt * decay).transpose(2, 3)  # a, [B, c, N, L]
    b, c = b.transpose(2, 3), c.transpose(2, 3)  # [B, c, G, L, D]

    pairs = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).tril()  # token i reads token j
    from_before = None  # tokens whose document began before the chunk, [B, c, 1, L]
    if document_starts is None:
        sums = steps.cumsum(-1)
    else:
        starts, began_before = starts_in_chunks(document_starts, chunk)  # [B, c, L]
        pairs = (pairs & (starts.unsqueeze(-1) == starts.unsqueeze(-2))).unsqueeze(2)  # [B, c, 1, L, L]
        from_before = began_before.unsqueeze(2)
        sums = torch.matmul(
            steps, pairs.squeeze(2).float().transpose(-1, -2)
        )  # over the document's tokens in the chunk
    weights = _PairWeights.apply(sums, torch.matmul(c, b.transpose(-1, -2)), pairs)  # [B, c, N, L, L]
    y = torch.matmul(weights, x.transpose(2, 3))  # [B, c, N, L, P]

    to_end = (sums[..., -1:] - sums).masked_fill(~pairs[..., -1, :], -torch.inf).exp()  # exp(s_L - s_j), [B, c, N, L]
    from_start = sums.exp()  # exp(s_i)
    if from_before is not None:
        from_start = from_start * from_before
    added = (x * to_end.transpose(2, 3).unsqueeze(-1)).unflatten(3, (groups, in_group))  # [B, c, L, G, N/G, P]
    added = torch.einsum("bclgnp,bcgld->bcgnpd", added, b).flatten(2, 3)  # [B, c, N, P, D]
    kept = from_start[..., -1, None, None]  # exp(s_L), [B, c, N, 1, 1]
    if state is None:
        state = added.new_zeros(batch, heads, head_dim, b.shape[-1])
    before, last = StateScan.apply(kept, added, state, 1)
    earlier = before.unflatten(2, (groups, in_group))  # [B, c, G, N/G, P, D]
    read = torch.einsum("bcgld,bcgnpd->bcgnlp", c, earlier).flatten(2, 3)  # [B, c, N, L, P]
    y = torch.addcmul(y, read, from_start.unsqueeze(-1))
    return y.transpose(2, 3).flatten(1, 2)[:, :length], last


class _PairWeights(torch.autograd.Function):
    """exp(s_i - s_j) (C_i B_j) for the pairs of tokens of a chunk that see each other, and 0 for the others.

    Autograd would go through twice as many tensors of all pairs.
    """

    @staticmethod
    def forward(ctx: Any, sums: Tensor, products: Tensor, visible: Tensor) -> Tensor:
        """Return weights [B, c, N, L, L].

        Args:
            ctx: Context.
            sums: s, [B, c, N, L].
            products: C_i B_j of each group, [B, c, G, L, L].
            visible: Whether token i reads token j, bool, [L, L] or [B, c, 1, L, L].
        """
        decays = (sums.unsqueeze(-1) - sums.unsqueeze(-2)).masked_fill_(~visible, -torch.inf).exp_()
        ctx.save_for_backward(decays, products)
        in_group = sums.shape[2] // products.shape[2]
        return (decays.unflatten(2, (-1, in_group)) * products.unsqueeze(3)).flatten(2, 3)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradients. That of a pair's s_i is the opposite of its s_j's."""
        decays, products = ctx.saved_tensors
        weighted = (gradient * decays).unflatten(2, (products.shape[2], -1))
        of_products = weighted.sum(3)
        of_pairs = weighted.mul_(products.unsqueeze(3)).flatten(2, 3)
        return of_pairs.sum(-1) - of_pairs.sum(-2), of_products, None
