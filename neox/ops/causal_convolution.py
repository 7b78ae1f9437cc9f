"""Convolution of each channel with its last tokens, which recurrent mixers have in front of their recurrence.

Legend: B batch, S sequence, C channels, K width of the convolution.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
            before its document. None for one document a row.

    Returns:
        Outputs [B, S, C], and the last K - 1 inputs, [B, K - 1, C].
    """
    length = x.shape[1]
    width = weight.shape[1]
    if before is None:
        before = x.new_zeros(x.shape[0], width - 1, x.shape[2])
    padded = torch.cat((before.to(x.dtype), x), dim=1)  # [B, K - 1 + S, C]
    y = x * weight[:, -1]
    if bias is not None:
        y = y + bias
    for distance in range(1, width):
        earlier = padded[:, width - 1 - distance : width - 1 - distance + length]
        if positions is not None:
            earlier = earlier * (positions >= distance).unsqueeze(-1)
        y = y + earlier * weight[:, -1 - distance]
    return y, padded[:, length:]
