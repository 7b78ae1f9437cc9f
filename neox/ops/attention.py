"""Attention of one layer, causal or not: three implementations with one signature.

A mask tensor is passed only if documents in one row are kept apart, if samples are padded, or by kinds of attention
that need one; a bias by positions that add to scores.

Legend: B batch, S sequence, N heads of queries, K of keys and values, G = N / K, D head dim.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from neox.architecture import MOST_BLOCKED, QUERY_BLOCK, AttentionImpl
from neox.ops.softmax import SoftmaxImpl, scale_mask_softmax


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
    causal: bool = True,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Attend: q [B, S, N, D], k and v [B, S, K, D] -> [B, S, N, D]; neighbouring G query heads share a key head.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        impl: "eager" (torch operations), "fused" (the Triton softmax) or "flash" (torch's
            scaled_dot_product_attention).
        scale: Factor of the scores in the matmul; 1/sqrt(D) if None.
        softmax_scale: Factor of the scores in the softmax. NeoX's query-key layer scaling divides by the layer number
            first and multiplies here, against overflow in fp16.
        dropout_p: Dropout probability of the attention weights.
        dropout_context: Entered around the dropout, to choose its random stream.
        causal: Whether queries see earlier keys alone.
        mask: Bool, [B or 1, N or 1, S or 1, S]: the pairs (query, key) that see each other, causal itself where
            attention is; all (earlier) ones if None. Not for "fused", unless it is [B, 1, 1, S] and not causal.
        bias: Added to the scaled scores, [1, N, S, S], with -inf for later keys.
    """
    assert mask is None or impl != "fused" or not causal, "refused by the configuration's validation"
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, N, S, D], [B, K, S, D]
    context = nullcontext() if dropout_context is None else dropout_context
    if impl == "flash":
        mask = mask if bias is None else masked_bias(bias, mask)
        if causal and mask is None and dropout_p == 0.0 and _goes_by_blocks(q):
            return _attention_in_blocks(q, k, v, scale * softmax_scale).transpose(1, 2)
        with context:
            out = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                dropout_p=dropout_p,
                is_causal=causal and mask is None,
                scale=scale * softmax_scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        return out.transpose(1, 2)
    kernel: SoftmaxImpl = "triton" if impl == "fused" else "torch"
    scores = _grouped_matmul(q * scale, k.transpose(-1, -2))  # [B, N, S, S]
    if bias is not None:
        scores = scores + (bias if softmax_scale == 1.0 else bias / softmax_scale)
    weights = scale_mask_softmax(scores, softmax_scale, kernel, causal=causal, visible=mask)
    if dropout_p > 0.0:
        with context:
            weights = F.dropout(weights, dropout_p)
    return _grouped_matmul(weights, v).transpose(1, 2)


def _goes_by_blocks(q: Tensor) -> bool:
    """Return whether causal flash attention is computed by blocks of queries (fp16 would overflow in the scores)."""
    return q.device.type == "cpu" and q.dtype in (torch.float32, torch.bfloat16) and q.shape[2] <= MOST_BLOCKED


def _attention_in_blocks(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attend causally, each block of queries to the keys up to its end: q [B, N, S, D], k, v [B, K, S, D] -> as q.

    On CPUs this takes 0.3 to 0.85 of the time of torch's flash attention (`benchmarks/results/train.md`).
    The backward pass needs copies of q, k and v and the weights of all blocks.
    """
    batch, heads, length, dim = q.shape
    groups = heads // k.shape[1]
    k, v = (x.reshape(-1, length, dim) for x in (k, v))  # [B*K, S, D]
    q = q.reshape(k.shape[0], groups, length, dim)
    done = []
    for start in range(0, length, QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, length)
        later = q.new_full((end - start, end), -math.inf).triu_(start + 1).repeat(groups, 1)
        scores = torch.baddbmm(later, q[:, :, start:end].flatten(1, 2), k[:, :end].transpose(1, 2), alpha=scale)
        done.append(torch.bmm(scores.softmax(-1), v[:, :end]).unflatten(1, (groups, -1)))
    return torch.cat(done, dim=2).view(batch, heads, length, dim)


def _grouped_matmul(x: Tensor, shared: Tensor) -> Tensor:
    """Multiply heads [B, N, S, X] by matrices [B, K, X, Y] that G neighbouring heads share -> [B, N, S, Y]."""
    batch, heads, rows, _ = x.shape
    groups = heads // shared.shape[1]
    if groups == 1:
        return torch.matmul(x, shared)
    stacked = x.reshape(batch, shared.shape[1], groups * rows, x.shape[-1])
    return torch.matmul(stacked, shared).view(batch, heads, rows, shared.shape[-1])


def masked_bias(bias: Tensor, visible: Tensor | None) -> Tensor:
    """Return a bias of scores [1, N, S, T] with -inf where a query does not see a key (bool, or for all pairs None)."""
    return bias if visible is None else bias.masked_fill(~visible, -math.inf)


def same_document_pairs(document_starts: Tensor) -> Tensor:
    """Return which (query, key) pairs lie in one document, the key not later: starts [B, S] -> bool [B, 1, S, S].

    Args:
        document_starts: Position in the row at which each token's document starts.
    """
    positions = torch.arange(document_starts.shape[1], device=document_starts.device)
    not_later = positions <= positions.unsqueeze(1)
    return ((positions >= document_starts.unsqueeze(-1)) & not_later).unsqueeze(1)


def unpadded_keys(lengths: Tensor, length: int) -> Tensor:
    """Return which keys of each sample are no padding: lengths [B] -> bool [B, 1, 1, S], for `length` S."""
    return (torch.arange(length, device=lengths.device) < lengths.unsqueeze(1))[:, None, None, :]
