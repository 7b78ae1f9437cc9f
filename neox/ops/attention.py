"""Attention of one layer, causal or not: three implementations with one signature.

Pairs are described only if documents in one row are kept apart, or if the kind of attention hides earlier tokens. There
is a mask tensor only if samples of a bidirectional network are padded, and a bias only if the position encoding adds to
scores.

Legend: B batch, S sequence, N heads of queries, K of keys and values, G = N / K, D head dim.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask

from neox.architecture import MASKED_QUERY_CHUNK, MOST_BLOCKED, QUERY_BLOCK, AttentionImpl
from neox.devices import AttentionBackend
from neox.ops.blocked_attention import blocked_attention
from neox.ops.flex import attention_by_block_mask
from neox.ops.softcap import softly_capped
from neox.ops.softmax import SoftmaxImpl, scale_mask_softmax, softmax_with_sinks
from neox.ops.visible_pairs import VisiblePairs

_TORCH_BACKENDS: Mapping[AttentionBackend, SDPBackend] = MappingProxyType(
    {
        "flash": SDPBackend.FLASH_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "memory_efficient": SDPBackend.EFFICIENT_ATTENTION,
        "math": SDPBackend.MATH,
    }
)
"""Kernel -> torch's name of it; `flex` is a function of its own."""


def core_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    impl: AttentionImpl,
    backend: AttentionBackend = "auto",
    scale: float | None = None,
    softmax_scale: float = 1.0,
    dropout_p: float = 0.0,
    dropout_context: AbstractContextManager[None] | None = None,
    causal: bool = True,
    pairs: VisiblePairs | None = None,
    queries: Sequence[range] | None = None,
    block_mask: BlockMask | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend: q [B, S, N, D], k and v [B, S, K, D] -> [B, S, N, D]; G neighbouring query heads share a key head.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        impl: "eager" (torch operations), "fused" (the Triton softmax) or "flash" (torch's
            scaled_dot_product_attention).
        backend: Kernel of "flash". All but "auto" and "flex" take a mask of pairs if there are any, and "flash" none.
        scale: Factor of the scores in the matmul; 1/sqrt(D) if None.
        softmax_scale: Factor of the scores in the softmax. NeoX's query-key layer scaling first divides by the layer's
            number and multiplies here, so that fp16 does not overflow.
        dropout_p: Dropout probability of the attention weights.
        dropout_context: Context of the dropout, which chooses its random stream.
        causal: Whether queries see earlier keys only.
        pairs: Which queries see which keys if attention is causal; all earlier ones if None. Not with "fused".
        queries: Indices of the queries among the keys, as ranges; only with pairs. None for all.
        block_mask: Blocks of these pairs (`block_mask_of`), for the kernel of GPUs; without it they get a mask tensor.
        mask: Keys that are not padding if attention is not causal, bool [B, 1, 1, S]; all if None.
        bias: Summand of the scaled scores, [1, N, S, S], with -inf for later keys.
        softcap: Bound of the scaled scores (`softly_capped`); 0 for none. "flash" has none, and no sinks.
        sinks: Scores [N] that take part in the softmax and add nothing ("eager" only).
    """
    assert impl != "flash" or (softcap == 0.0 and sinks is None), "the configuration chooses another kernel"
    assert pairs is None or impl != "fused", "refused by the configuration's validation"
    if scale is None:
        scale = 1.0 / math.sqrt(q.shape[-1])
    q = q.transpose(1, 2)  # [B, N, S, D]
    k = k.transpose(1, 2)  # [B, K, S, D]
    v = v.transpose(1, 2)
    context = dropout_context or nullcontext()
    if impl != "flash":
        if pairs is not None:
            mask = pairs.dense(queries)
            causal = False  # the pairs say so already
        kernel: SoftmaxImpl = "triton" if impl == "fused" else "torch"
        scores = _scores(q * scale, k, bias, softmax_scale, softcap)
        sink_scores = None if sinks is None else sinks.view(-1, 1, 1)
        weights = scale_mask_softmax(scores, softmax_scale, kernel, causal=causal, visible=mask, sinks=sink_scores)
        if dropout_p > 0.0:
            with context:
                weights = F.dropout(weights, dropout_p)
        return _grouped_matmul(weights, v).transpose(1, 2)
    scale = scale * softmax_scale
    if block_mask is not None:
        return attention_by_block_mask(q, k, v, block_mask, scale).transpose(1, 2)
    chooses = backend in ("auto", "flex")
    if pairs is not None and bias is None and chooses and _takes_blocks(q):
        with context:
            out = blocked_attention(q, k, v, pairs, scale, dropout_p=dropout_p, queries=queries)
        return out.transpose(1, 2)
    if pairs is not None:
        mask = pairs.dense(queries)
    if bias is not None:
        mask = masked_bias(bias, mask)
    if causal and mask is None and dropout_p == 0.0 and chooses and _goes_by_blocks(q):
        return _attention_in_blocks(q, k, v, scale).transpose(1, 2)
    with context:
        is_causal = causal and mask is None
        out = dot_product_attention(q, k, v, mask, scale, causal=is_causal, dropout_p=dropout_p, backend=backend)
    return out.transpose(1, 2)


def dot_product_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    *,
    causal: bool = False,
    dropout_p: float = 0.0,
    backend: AttentionBackend = "auto",
) -> Tensor:
    """Attend by torch's `scaled_dot_product_attention`: q [B, N, S, D], k [B, K, T, D], v [B, K, T, V] -> [B, N, S, V].

    On GPUs only the flash kernel takes heads of queries that share a head of keys, and it takes no mask, no fp32 and no
    values of another width. torch's way out would hold all scores in memory. So a single query makes its heads queries
    of their shared key head, and several queries get a copy of keys and values for each head; then the memory-efficient
    kernel takes both.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        mask: Pairs that see each other, bool, or a summand of the scaled scores; it broadcasts to [B, N, S, T].
        scale: Factor of the scores.
        causal: Whether queries see earlier keys only, if there is no mask.
        dropout_p: Dropout probability of the attention weights.
        backend: Kernel that computes it. torch raises an error if it cannot.
    """
    if backend in _TORCH_BACKENDS:
        groups = q.shape[1] // k.shape[1]
        if groups > 1:  # not every kernel takes shared heads
            k = k.repeat_interleave(groups, dim=1)
            v = v.repeat_interleave(groups, dim=1)
        with sdpa_kernel(_TORCH_BACKENDS[backend]):
            return F.scaled_dot_product_attention(q, k, v, mask, dropout_p, causal, scale=scale)
    shares = q.shape[1] != k.shape[1]
    flash_takes_it = mask is None and q.dtype != torch.float32 and q.shape[-1] == v.shape[-1]
    if shares and q.device.type != "cpu" and not flash_takes_it:
        return _without_shared_heads(q, k, v, mask, scale, causal=causal, dropout_p=dropout_p)
    return F.scaled_dot_product_attention(q, k, v, mask, dropout_p, causal, scale=scale, enable_gqa=shares)


def _without_shared_heads(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, *, causal: bool, dropout_p: float
) -> Tensor:
    """Attend as `dot_product_attention` does, with as many heads of keys as of queries."""
    batch, heads, queries, width = q.shape
    groups = heads // k.shape[1]
    if queries == 1 and not causal:
        q = q.reshape(batch, -1, groups, width)
        if mask is not None and mask.shape[1] > 1:  # pairs or summands of each head
            mask = mask.reshape(mask.shape[0], -1, groups, mask.shape[-1])
        out = F.scaled_dot_product_attention(q, k, v, mask, dropout_p, scale=scale)
        return out.reshape(batch, heads, 1, v.shape[-1])
    keys = k.repeat_interleave(groups, dim=1)
    values = v.repeat_interleave(groups, dim=1)
    return F.scaled_dot_product_attention(q, keys, values, mask, dropout_p, causal, scale=scale)


def attention_by_chunks(q: Tensor, k: Tensor, v: Tensor, pairs: VisiblePairs, scale: float, queries: range) -> Tensor:
    """Attend on a GPU within a window: q [B, N, S, D], k and v [B, K, T, D] -> [B, N, S, D]. For generation.

    A chunk of queries takes the keys that its window can reach, and a mask of them. Chunks are large and few: each is
    a few kernels, and the host reads nothing back.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        pairs: Which queries see which keys, with a `reach`.
        scale: Factor of the scores.
        queries: Indices of the queries among the keys.
    """
    assert pairs.reach is not None
    rows = torch.arange(pairs.rows, device=q.device)
    done = []
    for start in range(queries.start, queries.stop, MASKED_QUERY_CHUNK):
        end = min(start + MASKED_QUERY_CHUNK, queries.stop)
        first = max(0, start - pairs.reach + 1)
        seen = pairs.part(rows, torch.arange(start, end, device=q.device), torch.arange(first, end, device=q.device))
        chunk = q[:, :, start - queries.start : end - queries.start]
        done.append(dot_product_attention(chunk, k[:, :, first:end], v[:, :, first:end], seen, scale))
    return torch.cat(done, dim=2)


def _scores(q: Tensor, k: Tensor, bias: Tensor | None, softmax_scale: float, softcap: float) -> Tensor:
    """Return the scores [B, N, S, S] of scaled q [B, N, S, D] and k [B, K, S, D], which the softmax scales again."""
    scores = softly_capped(_grouped_matmul(q, k.transpose(-1, -2)), softcap)
    if bias is None:
        return scores
    if softmax_scale != 1.0:
        bias = bias / softmax_scale
    return scores + bias


def _takes_blocks(q: Tensor) -> bool:
    """Return whether queries are divided into blocks that look at visible keys only. No compiler sees through them."""
    return q.device.type == "cpu" and not torch.compiler.is_compiling()


def explicit_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    mask: Tensor | None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend with all scores in memory: q [B, N, S, D], k and v [B, K, T, D] -> as q. For generation, without dropout.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        scale: Factor of the scores.
        mask: Pairs (query, key) that see each other, bool, or a summand of the scores with -inf for other pairs; it
            broadcasts to [B, N, S, T]. None for all.
        softcap: Bound of the scaled scores (`softly_capped`); 0 for none.
        sinks: Scores that take part in the softmax and add nothing; they broadcast to [B, N, S, 1].
    """
    scores = softly_capped(_grouped_matmul(q * scale, k.transpose(-1, -2)), softcap).float()
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    elif mask is not None:
        scores = scores + mask
    return _grouped_matmul(softmax_with_sinks(scores, sinks).to(v.dtype), v)


def _goes_by_blocks(q: Tensor) -> bool:
    """Return whether causal flash attention is computed in blocks of queries. In fp16 the scores would overflow."""
    return q.device.type == "cpu" and q.dtype in (torch.float32, torch.bfloat16) and q.shape[2] <= MOST_BLOCKED


def _attention_in_blocks(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attend causally, each block of queries to the keys up to its end: q [B, N, S, D], k, v [B, K, S, D] -> as q.

    On CPUs this takes 0.3 to 0.85 of the time of torch's flash attention (`benchmarks/results/train.md`).
    The backward pass needs copies of q, k and v and the weights of all blocks.
    """
    batch, heads, length, dim = q.shape
    groups = heads // k.shape[1]
    k = k.reshape(-1, length, dim)  # [B*K, S, D]
    v = v.reshape(-1, length, v.shape[-1])
    q = q.reshape(k.shape[0], groups, length, dim)
    done = []
    for start in range(0, length, QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, length)
        later = q.new_full((end - start, end), -math.inf).triu_(start + 1).repeat(groups, 1)
        scores = torch.baddbmm(later, q[:, :, start:end].flatten(1, 2), k[:, :end].transpose(1, 2), alpha=scale)
        done.append(torch.bmm(scores.softmax(-1), v[:, :end]).unflatten(1, (groups, -1)))
    return torch.cat(done, dim=2).view(batch, heads, length, -1)


def _grouped_matmul(x: Tensor, shared: Tensor) -> Tensor:
    """Multiply heads [B, N, S, X] by matrices [B, K, X, Y] that G neighbouring heads share -> [B, N, S, Y]."""
    batch, heads, rows, _ = x.shape
    groups = heads // shared.shape[1]
    if groups == 1:
        return torch.matmul(x, shared)
    stacked = x.reshape(batch, shared.shape[1], groups * rows, x.shape[-1])
    return torch.matmul(stacked, shared).view(batch, heads, rows, shared.shape[-1])


def masked_bias(bias: Tensor, visible: Tensor | None) -> Tensor:
    """Return a bias of scores [1, N, S, T] with -inf for pairs that are not visible (bool; None for all)."""
    if visible is None:
        return bias
    return bias.masked_fill(~visible, -math.inf)


def unpadded_keys(lengths: Tensor, length: int) -> Tensor:
    """Return which keys of each sample are not padding: lengths [B] -> bool [B, 1, 1, S], for `length` S."""
    return (torch.arange(length, device=lengths.device) < lengths.unsqueeze(1))[:, None, None, :]
