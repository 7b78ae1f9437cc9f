"""Scaled, masked softmax of attention scores: the torch reference, and the call of the Triton kernels.

Legend: B batch, N heads, S sequence.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from neox.errors import NeoXError

MASKED_SCORE = -10000.0
"""Value of masked scores in NeoX and Megatron-LM."""

SoftmaxImpl = Literal["torch", "triton"]


def scale_mask_softmax(
    scores: Tensor,
    scale: float = 1.0,
    impl: SoftmaxImpl = "torch",
    *,
    causal: bool = True,
    visible: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return softmax(scale x scores) over the last dim with masked positions: [B, N, S, S] -> same shape, dtype.

    Scores are scaled and summed in fp32, whatever their dtype.

    Args:
        scores: Attention scores.
        scale: Factor of the scores.
        impl: "torch", or "triton" for one kernel in each direction.
        causal: Whether later positions are masked.
        visible: Pairs (query, key) that are not masked, bool, of a shape that broadcasts to that of the scores. A query
            that sees nothing gets equal weights. "triton" takes only [B, 1, 1, S], and not together with `causal`.
        sinks: Further scores that take part in the softmax and are left out of the result ("torch" only).

    Raises:
        NeoXError: If the Triton kernel cannot run.
    """
    assert impl != "triton" or sinks is None, "the configuration chooses another kernel"
    if impl == "triton":
        return _triton_softmax(scores, scale, causal, visible)
    x = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if scale != 1.0:
        x = x * scale
    if visible is not None:
        x = x.masked_fill(~visible, MASKED_SCORE)
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
        x = x.masked_fill(later, MASKED_SCORE)
    return softmax_with_sinks(x, sinks).to(scores.dtype)


def softmax_with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the softmax over keys, and one more score for each query, whose weight is left out.

    Args:
        scores: Scores [..., T] in fp32.
        sinks: Further scores, which broadcast to [..., 1]; None for none.
    """
    if sinks is None:
        return scores.softmax(-1)
    further = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.cat((scores, further), dim=-1).softmax(-1)[..., :-1]


def _triton_softmax(scores: Tensor, scale: float, causal: bool, visible: Tensor | None) -> Tensor:
    try:
        from neox.ops.triton_softmax import causal_softmax, padded_softmax
    except ImportError as error:
        key = "scaled_upper_triang_masked_softmax_fusion" if causal else "scaled_masked_softmax_fusion"
        raise NeoXError(f"the fused softmax needs the package triton ({error}); install it, or unset {key}") from error
    if causal:
        assert visible is None, "refused by the configuration's validation"
        return causal_softmax(scores, scale)
    return padded_softmax(scores, scale, visible, MASKED_SCORE)
