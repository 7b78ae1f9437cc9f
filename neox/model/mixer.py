"""What recurrent mixers share: they take attention's place in a block, and keep a state of earlier tokens.

Legend: B batch, S sequence, H hidden, C channels here, K width of a convolution, T tensor ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from neox.architecture.recurrence import SELECTIVE_FP32
from neox.model.cache import StateForm
from neox.model.context import BlockContext
from neox.ops import causal_convolution
from neox.parallel import (
    ColumnParallelLinear,
    ParallelGrid,
    RowParallelLinear,
    Summand,
    TensorOptions,
    TokenShares,
    mark_split,
    recomputed,
)


class Mixer(TokenShares):
    """A recurrence over tokens: hidden states [B, S, H] -> [B, S, H]; with sequence parallelism, shares [B, S/T, H].

        hidden [H] ── in_proj ── between: convolution, recurrence, gates, norm [C] ── out_proj, reduced ── [H]

    Training keeps the results of the two products. Everything between them is computed again in the backward pass, as
    in mamba-ssm: a recurrence makes large tensors from small ones.

    In training and scoring `context.state` is None, and states before the first token are zero; they start anew in each
    document (`context.document_starts`). In generation `context.state` holds the states of earlier tokens, which
    `between` replaces.

    Attributes:
        in_proj: The input projection.
        out_proj: The output projection.
        state_form: Shapes of the state on this rank.

    Parameters of `SELECTIVE_FP32` are fp32 in every precision. DeepSpeed knows one precision and rounds them; then
    training gives the mixer their fp32 values (`set_fp32`), with which it computes.
    """

    in_proj: ColumnParallelLinear
    out_proj: RowParallelLinear
    state_form: StateForm

    def between(self, projected: Tensor, context: BlockContext) -> Tensor:
        """Compute what the output projection takes from what the input projection gives: [B, S, ...] -> [B, S, C]."""
        raise NotImplementedError

    def fp32(self, name: str) -> Tensor:
        """Return one of the parameters of `SELECTIVE_FP32` as it is computed with."""
        parameter: Tensor = getattr(self, name)
        values = getattr(self, f"{name}_fp32", None)
        if values is None:
            return parameter.float()
        exact: Tensor = _WithValues.apply(parameter, values)
        return exact

    def set_fp32(self, name: str, values: Tensor) -> None:
        """Compute with these fp32 values of a parameter, whose gradient remains its own.

        Args:
            name: Name of the parameter in the mixer.
            values: A tensor of its shape, which stays the caller's.
        """
        self.register_buffer(f"{name}_fp32", values, persistent=False)

    def mix(self, x: Tensor, context: BlockContext) -> Tensor:
        """Run everything before the output projection: [B, S, H] -> [B, S, C]."""
        projected = self.in_proj(x)
        if context.state is None and torch.is_grad_enabled():
            mixed: Tensor = recomputed(self.between, projected, context)
            return mixed
        return self.between(projected, context)

    def forward(self, x: Tensor, context: BlockContext) -> Tensor:
        """Mix tokens."""
        return self.out_proj(self.mix(x, context))

    def summand(self, x: Tensor, context: BlockContext) -> Summand:
        """Return this rank's part of the output, before the reduction over tensor ranks."""
        return self.out_proj.summand(self.mix(x, context))

    @property
    def dense(self) -> RowParallelLinear:
        """The output projection, by the name that attention has for it."""
        return self.out_proj


class _WithValues(torch.autograd.Function):
    """A parameter with other values."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, values: Tensor) -> Tensor:
        """Return the values."""
        ctx.dtype = parameter.dtype
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return their gradient as that of the parameter."""
        return gradient.to(ctx.dtype), None


def fp32_parameter(*shape: int, **options: Unpack[TensorOptions]) -> nn.Parameter:
    """Return a parameter without values, fp32 where the others have 16 bits."""
    dtype = options.get("dtype")
    if dtype is not None:
        dtype = torch.promote_types(dtype, torch.float32)
    return nn.Parameter(torch.empty(*shape, device=options.get("device"), dtype=dtype))


def fp32_values(layer: nn.Module) -> dict[str, Tensor]:
    """Return the fp32 values that the mixers of a layer compute with (`Mixer.set_fp32`), by the parameter's name."""
    found = {}
    for name, module in layer.named_modules():
        if isinstance(module, Mixer):
            for parameter in SELECTIVE_FP32:
                values = getattr(module, f"{parameter}_fp32", None)
                if values is not None:
                    found[f"{name}.{parameter}"] = values
    return found


def continued(
    one_token: Callable[..., tuple[Tensor, Tensor]],
    scan: Callable[..., tuple[Tensor, Tensor]],
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    decay: Tensor,
    state: Tensor,
) -> Tensor:
    """Run a recurrence of Mamba behind the tokens of a state, and replace the state. Returns the outputs [B, S, ...].

    Args:
        one_token: The recurrence of a single token, without the dimension of tokens.
        scan: The same for several tokens. Both take (x, dt, decay, b, c, state) and return outputs and the new state,
            which the first writes to `out`.
        inputs: x, dt, b and c, [B, S, ...] each.
        decay: A.
        state: The state, which is overwritten.
    """
    x, dt, b, c = inputs
    if x.shape[1] == 1:
        y, _ = one_token(x.squeeze(1), dt.squeeze(1), decay, b.squeeze(1), c.squeeze(1), state, out=state)
        return y.unsqueeze(1)
    y, last = scan(x, dt, decay, b, c, state)
    state.copy_(last)
    return y


class CausalConvolution(nn.Module):
    """A convolution of each of this rank's channels with its last K tokens: [B, S, C] -> [B, S, C].

    Parameters have the shapes of `nn.Conv1d`: weight [C, 1, K], bias [C].

    Args:
        channels: Number of channels on this rank.
        width: Tokens that it sees, K.
        grid: Process groups.
        bias: Whether there is a bias.
        **options: Device and type of the parameters.
    """

    def __init__(
        self, channels: int, width: int, grid: ParallelGrid, *, bias: bool, **options: Unpack[TensorOptions]
    ) -> None:
        super().__init__()
        split = grid.tp_size > 1
        self.weight = mark_split(nn.Parameter(torch.empty(channels, 1, width, **options)), split)
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = mark_split(nn.Parameter(torch.empty(channels, **options)), split)

    def forward(self, x: Tensor, context: BlockContext) -> Tensor:
        """Convolve: [B, S, C] -> [B, S, C]. The first tensor of the block's state is its last K - 1 inputs."""
        positions = None
        if context.document_starts is not None:
            positions = context.positions
        before = None
        if context.state is not None:
            before = context.state.tensors[0]
        y, last = causal_convolution(x, self.weight.squeeze(1), self.bias, before=before, positions=positions)
        if before is not None:
            before.copy_(last)
        return y


def without_padding(x: Tensor, context: BlockContext) -> Tensor:
    """Return x [B, S, ...] with zeros for tokens of padding in front of a prompt."""
    if context.state is None or context.state.is_text is None:
        return x
    is_text = context.state.is_text
    return x * is_text.view(*is_text.shape, *[1] * (x.ndim - 2))
