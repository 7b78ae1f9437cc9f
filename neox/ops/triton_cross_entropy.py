"""Kernels of the cross entropy by rows of logits (Triton): one program per row, sums in fp32.

Legend: R tokens, V vocabulary here.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 8192
"""Most columns that a program holds at once."""


@triton.jit  # type: ignore[untyped-decorator]
def _scores_kernel(
    logits: tl.tensor,
    labels: tl.tensor,
    log_sums: tl.tensor,
    picked: tl.tensor,
    columns: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    scores = logits + row * columns
    largest = -float("inf")
    total = 0.0
    for first in range(0, columns, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(scores + at, mask=at < columns, other=-float("inf")).to(tl.float32)
        larger = tl.maximum(largest, tl.max(x, axis=0))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(x - larger), axis=0)
        largest = larger
    tl.store(log_sums + row, largest + tl.log(total))
    label = tl.load(labels + row)
    here = (label >= 0) & (label < columns)
    tl.store(picked + row, tl.load(scores + label, mask=here, other=0.0).to(tl.float32))


@triton.jit  # type: ignore[untyped-decorator]
def _gradient_kernel(
    logits: tl.tensor,
    labels: tl.tensor,
    log_sums: tl.tensor,
    weights: tl.tensor,
    softmax_weights: tl.tensor,
    columns: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = logits + row * columns + at
    x = tl.load(place, mask=at < columns, other=0.0).to(tl.float32)
    softmax = tl.exp(x - tl.load(log_sums + row))
    grad = softmax * tl.load(softmax_weights + row)
    grad = tl.where(at == tl.load(labels + row), grad - tl.load(weights + row), grad)
    tl.store(place, grad.to(logits.dtype.element_ty), mask=at < columns)


def fused_label_scores(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Do what `neox.ops.cross_entropy.label_scores` does, in one pass over contiguous logits."""
    rows, columns = logits.shape
    log_sums, picked = torch.empty(2, rows, device=logits.device, dtype=torch.float32).unbind(0)
    _scores_kernel[(rows,)](logits.contiguous(), labels, log_sums, picked, columns, **_sizes(columns))
    return log_sums, picked


def fused_logits_gradient(
    logits: Tensor, log_sums: Tensor, labels: Tensor, weights: Tensor, softmax_weights: Tensor
) -> Tensor:
    """Do what `neox.ops.cross_entropy.logits_gradient` does, in place."""
    logits = logits.contiguous()
    rows, columns = logits.shape
    sizes = _sizes(columns)
    grid = (rows, triton.cdiv(columns, sizes["BLOCK"]))
    rows_of = (log_sums.contiguous(), weights.contiguous(), softmax_weights.contiguous())
    _gradient_kernel[grid](logits, labels, *rows_of, columns, **sizes)
    return logits


def _sizes(columns: int) -> dict[str, int]:
    block = min(_BLOCK, triton.next_power_of_2(columns))
    return {"BLOCK": block, "num_warps": min(16, max(1, block // 512))}
