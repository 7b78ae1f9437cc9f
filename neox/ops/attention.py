"""Causal attention of one layer, three ways with one signature. No mask tensor is ever passed: causality is a literal.

Legend: B batch, S sequence, N heads, D head dim.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from neox.ops.softmax import SoftmaxImpl, scale_mask_softmax

AttentionImpl = Literal["eager", "fused", "flash"]


def core_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    impl: AttentionImpl,
    scale: float | None = None,
    softmax_scale: float = 1.0,
    dropout_p: float = 0.0,
    dropout_context: AbstractContextManager[None] | None = None,
) -> Tensor:
    """Attend: q, k, v [B, S, N, D] -> [B, S, N, D].

    impl: "eager" (torch operations), "fused" (the Triton softmax), "flash" (torch's scaled_dot_product_attention).
    scale: multiplies the scores in the matmul, 1/sqrt(D) if None; softmax_scale multiplies them in the softmax (NeoX's
    query-key layer scaling divides by the layer number first and multiplies here, against overflow in fp16).
    dropout_context: entered around the dropout, to choose its random stream.
    """
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, N, S, D]
    context = nullcontext() if dropout_context is None else dropout_context
    if impl == "flash":
        with context:
            out = F.scaled_dot_product_attention(
                q, k, v, dropout_p=dropout_p, is_causal=True, scale=scale * softmax_scale
            )
        return out.transpose(1, 2)
    kernel: SoftmaxImpl = "triton" if impl == "fused" else "torch"
    scores = torch.matmul(q * scale, k.transpose(-1, -2))  # [B, N, S, S]
    weights = scale_mask_softmax(scores, softmax_scale, kernel)
    if dropout_p > 0.0:
        with context:
            weights = F.dropout(weights, dropout_p)
    return torch.matmul(weights, v).transpose(1, 2)
