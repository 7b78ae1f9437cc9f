"""Scaled, masked softmax of attention scores: the torch reference, and the call of the Triton kernels.

Legend: B batch, N heads, S sequence.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from neox.errors import NeoXError

MASKED_SCORE = -10000.0
"""What NeoX and Megatron-LM put in place of masked scores."""

SoftmaxImpl = Literal["torch", "triton"]


def scale_mask_softmax(
    scores: Tensor,
    scale: float = 1.0,
    impl: SoftmaxImpl = "torch",
    *,
    causal: bool = True,
    visible: Tensor | None = None,
) -> Tensor:
    """Return softmax(scale x scores) over the last dim with masked positions: [B, N, S, S] -> same shape, dtype.

    Scaling and sums are fp32 inside whatever the scores' dtype.

    Args:
        scores: Attention scores.
        scale: Factor of the scores.
        impl: "torch", or "triton" for one kernel forward and one backward.
        causal: Mask later positions.
        visible: Pairs (query, key) that are not masked, bool, of a shape that extends to that of the scores; "triton"
            takes [B, 1, 1, S], and not with `causal`. A query that sees nothing gets equal weights.

    Raises:
        NeoXError: If the Triton kernel cannot run.
    """
    if impl == "triton":
        return _triton_softmax(scores, scale, causal, visible)
    x = scores.to(torch.promote_types(scores.dtype, torch.float32))
    x = x if scale == 1.0 else x * scale
    if visible is not None:
        x = x.masked_fill(~visible, MASKED_SCORE)
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
        x = x.masked_fill(later, MASKED_SCORE)
    return x.softmax(-1).to(scores.dtype)


def _triton_softmax(scores: Tensor, scale: float, causal: bool, visible: Tensor | None) -> Tensor:
    try:
        from neox.ops.triton_softmax import causal_softmax, padded_softmax
    except ImportError as error:
        raise NeoXError(
            f"the fused softmax needs the package triton ({error}); install it, or unset "
            f"{'scaled_upper_triang_masked_softmax_fusion' if causal else 'scaled_masked_softmax_fusion'}"
        ) from error
    if causal:
        assert visible is None, "refused by the configuration's validation"
        return causal_softmax(scores, scale)
    return padded_softmax(scores, scale, visible, MASKED_SCORE)
