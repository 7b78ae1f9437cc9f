"""Scaled, causally masked softmax of attention scores: the torch reference, and the call of the Triton kernel.

Legend: B batch, N heads, S sequence.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from neox.errors import NeoXError

MASKED_SCORE = -10000.0
"""What NeoX puts in place of scores of later positions."""

SoftmaxImpl = Literal["torch", "triton"]


def scale_mask_softmax(scores: Tensor, scale: float = 1.0, impl: SoftmaxImpl = "torch") -> Tensor:
    """Return softmax(scale x scores) over the last dim with later positions masked: [B, N, S, S] -> same shape, dtype.

    Scaling and sums are fp32 inside whatever the scores' dtype.

    Args:
        scores: Attention scores.
        scale: Factor of the scores.
        impl: "torch", or "triton" for one kernel forward and one backward.

    Raises:
        NeoXError: If the Triton kernel cannot run.
    """
    if impl == "triton":
        return _triton_softmax(scores, scale)
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
    x = scores.to(torch.promote_types(scores.dtype, torch.float32))
    x = x if scale == 1.0 else x * scale
    return x.masked_fill(later, MASKED_SCORE).softmax(-1).to(scores.dtype)


def _triton_softmax(scores: Tensor, scale: float) -> Tensor:
    try:
        from neox.ops.triton_softmax import causal_softmax
    except ImportError as error:
        raise NeoXError(
            f"the fused softmax needs the package triton ({error}); install it, or unset "
            "scaled_upper_triang_masked_softmax_fusion"
        ) from error
    return causal_softmax(scores, scale)
