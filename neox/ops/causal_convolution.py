"""Convolution of each channel with its last tokens, which recurrent mixers have in front of their recurrence.

Legend: B batch, S sequence, C channels, K width of the convolution.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from neox.ops import recurrent_kernels


def causal_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, before: Tensor | None = None, positions: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Convolve each channel with its own weights: y_t = bias + sum over k of w_k x_(t - K + 1 + k).

    Args:
        x: Inputs [B, S, C].
        weight: Weights [C, K], the newest token's last.
        bias: Bias [C]; None for none.
        before: The K - 1 inputs before these [B, K - 1, C]; zeros if None.
        positions: Position of each token in its document [B, S], if a row has several: a token does not see those
            before its document. None for one document a row, and with `before`.

    Returns:
        Outputs [B, S, C], and the last K - 1 inputs, [B, K - 1, C].
    """
    kept = weight.shape[1] - 1
    if before is None:
        y = _convolved(x, weight, bias, positions)
        return y, F.pad(x[:, max(0, x.shape[1] - kept) :], (0, 0, max(0, kept - x.shape[1]), 0))
    whole = torch.cat((before.to(x.dtype), x), dim=1)  # [B, K - 1 + S, C]
    convolve = _Convolution.apply if x.shape[1] == 1 else _convolved  # a kernel would compute K tokens for one
    y = convolve(whole, weight, bias, positions)
    return y[:, kept:], whole[:, x.shape[1] :]


def _convolved(x: Tensor, weight: Tensor, bias: Tensor | None, positions: Tensor | None) -> Tensor:
    """Convolve with zeros before the first token, by a fused kernel where there is one."""
    channels, width = weight.shape
    if recurrent_kernels.takes_kernel(recurrent_kernels.CONVOLUTION, x) and 2 <= width <= 4 and channels % 8 == 0:
        return recurrent_kernels.convolved(x, weight, bias, positions)
    y: Tensor = _Convolution.apply(x, weight, bias, positions)
    return y


class _Convolution(torch.autograd.Function):
    """The convolution with zeros before the first token. Products are added in place: it is bound by memory.

    A product that autograd records would be a tensor of its own, three for each tap with the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, positions: Tensor | None) -> Tensor:
        """Return y [B, S, C] for x [B, S, C] and weights [C, K]."""
        ctx.save_for_backward(x, weight, positions)
        newest, *earlier = weight.t().flip(0)
        y = x * newest if bias is None else torch.addcmul(bias, x, newest)
        for distance, tap in enumerate(earlier[: x.shape[1] - 1], start=1):
            y[:, distance:].addcmul_(_of_document(x[:, :-distance], positions, distance), tap)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        """Return the gradients of x, weights and bias; those of weights that are not trained cost nothing."""
        x, weight, positions = ctx.saved_tensors
        _, trains_weight, trains_bias, _ = ctx.needs_input_grad
        newest, *earlier = weight.t().flip(0)
        of_x = gradient * newest
        of_taps = torch.zeros_like(weight) if trains_weight else None
        if of_taps is not None:
            of_taps[:, -1] = (gradient * x).sum((0, 1))
        for distance, tap in enumerate(earlier[: x.shape[1] - 1], start=1):
            later = _of_document(gradient[:, distance:], positions, distance)
            of_x[:, :-distance].addcmul_(later, tap)
            if of_taps is not None:
                of_taps[:, -1 - distance] = (later * x[:, :-distance]).sum((0, 1))
        of_bias = gradient.sum((0, 1)) if trains_bias else None
        return of_x, of_taps, of_bias, None


def _of_document(x: Tensor, positions: Tensor | None, distance: int) -> Tensor:
    """Return [B, S - distance, C] with zeros for pairs of tokens at this distance that are of different documents."""
    if positions is None:
        return x
    return x * (positions[..., distance:] >= distance).unsqueeze(-1)
