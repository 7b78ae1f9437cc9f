"""Fused kernels: scale, causal or padding mask, and softmax in one pass, and another one backward (Triton).

There is one program for each row of scores. With the causal mask it reads only the positions up to its own, and writes
zeros after them. Sums are fp32.

Legend: B batch, N heads, S sequence.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from neox.architecture import FUSED_SOFTMAX_LENGTH
from neox.errors import NeoXError
from neox.ops.fast_paths import has_fast_path

_INTERPRETED = bool(triton.knobs.runtime.interpret)
_GROUP = 16
"""Columns that are read or left out together. If masks are equal over a group, a thread can read 16 bytes at once."""


@triton.jit  # type: ignore[untyped-decorator]
def _forward_kernel(
    scores: tl.tensor, weights: tl.tensor, scale: tl.tensor, length: tl.tensor, BLOCK: tl.constexpr, GROUP: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    last = row % length
    read = (columns // GROUP * GROUP <= last) & (columns < length)
    x = tl.load(scores + row * length + columns, mask=read, other=0.0).to(tl.float32) * scale
    x = tl.where(columns <= last, x, -float("inf"))
    x = tl.exp(x - tl.max(x, axis=0))
    y = x / tl.sum(x, axis=0)
    tl.store(weights + row * length + columns, y.to(weights.dtype.element_ty), mask=columns < length)


@triton.jit  # type: ignore[untyped-decorator]
def _backward_kernel(
    weights: tl.tensor,
    grad: tl.tensor,
    out: tl.tensor,
    scale: tl.tensor,
    length: tl.tensor,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    read = (columns // GROUP * GROUP <= row % length) & (columns < length)
    # Weights of later positions are 0. Their gradients only matter if they are not finite, and are set to 0 below.
    y = tl.load(weights + row * length + columns, mask=read, other=0.0).to(tl.float32)
    dy = tl.load(grad + row * length + columns, mask=read, other=0.0).to(tl.float32)
    dy = tl.where(columns <= row % length, dy, 0.0)
    dx = (dy - tl.sum(y * dy, axis=0)) * y * scale
    tl.store(out + row * length + columns, dx.to(out.dtype.element_ty), mask=columns < length)


@triton.jit  # type: ignore[untyped-decorator]
def _padded_forward_kernel(
    scores: tl.tensor,
    weights: tl.tensor,
    visible: tl.tensor,
    scale: tl.tensor,
    rows: tl.tensor,
    masked: tl.tensor,
    length: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < length
    seen = tl.load(visible + row // rows * length + columns, mask=inside, other=0)
    x = tl.load(scores + row * length + columns, mask=inside, other=0.0).to(tl.float32) * scale
    x = tl.where(seen != 0, x, tl.where(inside, masked, -float("inf")))
    x = tl.exp(x - tl.max(x, axis=0))
    y = x / tl.sum(x, axis=0)
    tl.store(weights + row * length + columns, y.to(weights.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _padded_backward_kernel(
    weights: tl.tensor,
    grad: tl.tensor,
    out: tl.tensor,
    visible: tl.tensor,
    scale: tl.tensor,
    rows: tl.tensor,
    length: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < length
    seen = tl.load(visible + row // rows * length + columns, mask=inside, other=0)
    y = tl.load(weights + row * length + columns, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(grad + row * length + columns, mask=inside, other=0.0).to(tl.float32)
    dx = tl.where(seen != 0, (dy - tl.sum(y * dy, axis=0)) * y * scale, 0.0)
    tl.store(out + row * length + columns, dx.to(out.dtype.element_ty), mask=inside)


def causal_softmax(scores: Tensor, scale: float) -> Tensor:
    """Return softmax(scale x scores) with later positions at exactly 0: [B, N, S, S], fp16, bf16 or fp32.

    Raises:
        NeoXError: If the kernel cannot serve the device or the length.
    """
    _check(scores, scale)
    weights: Tensor = _softmax(scores.contiguous(), float(scale))
    return weights


def padded_softmax(scores: Tensor, scale: float, visible: Tensor | None, masked_score: float) -> Tensor:
    """Return softmax(scale x scores) with keys masked that are not visible: [B, N, S, S], fp16, bf16 or fp32.

    Args:
        scores: Attention scores.
        scale: Factor of the scores.
        visible: Which keys of each sample are not padding, bool [B, 1, 1, S]; None for all.
        masked_score: What replaces the scores of padding.

    Raises:
        NeoXError: If the kernel cannot serve the device or the length.
    """
    _check(scores, scale)
    batch = scores.shape[0]
    length = scores.shape[-1]
    if visible is None:
        visible = torch.ones(batch, 1, 1, length, dtype=torch.bool, device=scores.device)
    keys = visible.expand(batch, 1, 1, length).contiguous()
    return _PaddedSoftmax.apply(scores, float(scale), keys, masked_score)


def _check(scores: Tensor, scale: float) -> None:
    if scale <= 0.0:
        raise ValueError(f"scale must be positive, got {scale}")
    if scores.shape[-1] != scores.shape[-2]:
        raise ValueError(f"scores must be square in the last two dimensions, got {tuple(scores.shape)}")
    if scores.shape[-1] > FUSED_SOFTMAX_LENGTH:
        limit = f"up to {FUSED_SOFTMAX_LENGTH} positions"
        raise NeoXError(f"the fused softmax serves {limit}, got {scores.shape[-1]}: use flash")
    if not has_fast_path("triton", scores.device) and not _INTERPRETED:
        raise NeoXError(f"the fused softmax needs a GPU, the scores are on {scores.device}: use impl='torch'")


def _launch(kernel: Any, like: Tensor, *args: Any, **constants: int) -> None:
    length = like.shape[-1]
    block = triton.next_power_of_2(length)
    warps = min(16, max(1, block // 512))
    kernel[(like.numel() // length,)](*args, length, BLOCK=block, num_warps=warps, **constants)


# As operators of torch's library they stay whole under torch.compile, so that a block around them is one graph.
@torch.library.custom_op("neox::causal_softmax", mutates_args=())
def _softmax(scores: Tensor, scale: float) -> Tensor:
    weights = torch.empty_like(scores)
    _launch(_forward_kernel, scores, scores, weights, scale, GROUP=_GROUP)
    return weights


@torch.library.custom_op("neox::causal_softmax_backward", mutates_args=())
def _softmax_backward(weights: Tensor, grad: Tensor, scale: float) -> Tensor:
    out = torch.empty_like(weights)
    _launch(_backward_kernel, weights, weights, grad.contiguous(), out, scale, GROUP=_GROUP)
    return out


def _keep(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
    ctx.save_for_backward(output)
    ctx.scale = inputs[1]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    (weights,) = ctx.saved_tensors
    return _softmax_backward(weights, grad, ctx.scale), None


_softmax.register_fake(lambda scores, scale: torch.empty_like(scores))
_softmax_backward.register_fake(lambda weights, grad, scale: torch.empty_like(weights))
_softmax.register_autograd(_backward, setup_context=_keep)


class _PaddedSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, scale: float, visible: Tensor, masked_score: float) -> Tensor:
        scores = scores.contiguous()
        visible = visible.view(torch.uint8)
        weights = torch.empty_like(scores)
        rows = scores.shape[1] * scores.shape[2]  # of one sample
        _launch(_padded_forward_kernel, scores, scores, weights, visible, scale, rows, masked_score)
        ctx.save_for_backward(weights, visible)
        ctx.scale = scale
        ctx.rows = rows
        return weights

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        weights, visible = ctx.saved_tensors
        out = torch.empty_like(weights)
        _launch(_padded_backward_kernel, weights, weights, grad.contiguous(), out, visible, ctx.scale, ctx.rows)
        return out, None, None, None
