"""Linear layers that multiply in 8-bit floating point: bf16 in and out, scales from the values of each call.

Each operand is divided by a scale, so that its largest magnitude becomes the format's largest number, and rounded:
inputs and weights to e4m3, gradients of outputs to the format of the recipe (arXiv:2209.05433 describes both formats).
Sums of products are multiplied by both scales and rounded to bf16. Nothing is kept between calls.

Legend: M, N rows of the operands, K the dim that is summed over; a b^T is [M, N].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from neox.architecture import FP8_MULTIPLE, FP8_QUOTIENTS
from neox.ops.linear import ProductLinear, linear

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
_SMALLEST = 1e-30
"""Least magnitude that a scale is computed for, so that it is a normal fp32 number and not 0."""


@dataclass(frozen=True)
class Fp8Recipe:
    """How operands become fp8.

    Attributes:
        rowwise: Whether each row of an operand (along K) has a scale; otherwise the whole operand has one.
        gradients: Format of output gradients. A single scale for a whole tensor needs e5m2, which has e4m3's range
            squared and half of its precision.
    """

    rowwise: bool
    gradients: torch.dtype

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return x W^T + b as `F.linear` does, in fp8 if gradients are recorded; evaluations stay bf16."""
        if not torch.is_grad_enabled():
            return linear(x, weight, bias)
        return ProductLinear.apply(x, weight, bias, self.product, self.of_gradient)

    def product(self, a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        """Return a b^T + bias without a gradient: inputs [..., K], weights [N, K] -> [..., N]."""
        # Fast accumulation keeps sums of tensor cores in 14 bits, at up to twice the speed.
        return self._multiply(a, b, bias, E4M3, fast=True)

    def of_gradient(self, a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        """Return a b^T + bias without a gradient: output gradients [..., K], weights or inputs [N, K] -> [..., N]."""
        return self._multiply(a, b, bias, self.gradients, fast=self.rowwise)

    def _multiply(self, a: Tensor, b: Tensor, bias: Tensor | None, kind: torch.dtype, *, fast: bool) -> Tensor:
        rows = a.flatten(0, -2)
        missing = -rows.shape[-1] % FP8_MULTIPLE
        if missing:
            rows = F.pad(rows, (0, missing))
            b = F.pad(b, (0, missing))
        left, left_scale = self._rounded(rows, kind)
        right, right_scale = self._rounded(b, E4M3)
        if rows.device.type == "cpu":
            product = _product_on_cpu(left, right, left_scale, right_scale, bias)
        else:
            product = scaled_product(left, right, left_scale, right_scale, bias, fast=fast)
        return product.view(*a.shape[:-1], b.shape[0])

    def _rounded(self, x: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return x [M, K] in fp8, row after row in memory, and its scale in fp32, [M, 1] or []."""
        size = x.abs()
        scale = fp8_scale(size.amax(-1, keepdim=True) if self.rowwise else size.amax(), kind)
        return (x.float() / scale).to(kind).contiguous(), scale


def fp8_scale(largest: Tensor, kind: torch.dtype) -> Tensor:
    """Return the fp32 scale that makes the largest magnitude the format's largest number; any shape."""
    return largest.float().clamp(min=_SMALLEST) / torch.finfo(kind).max


def to_fp8(x: Tensor, scale: Tensor, kind: torch.dtype) -> Tensor:
    """Return x / scale in fp8, row after row in memory. The scale has as many dims, and is broadcast.

    The fp32 quotient of all experts' weights would be as large as four copies in fp8. So it is made for a part of the
    first dim at a time.
    """
    rounded = torch.empty(x.shape, dtype=kind, device=x.device)
    size = max(1, FP8_QUOTIENTS * len(x) // max(1, x.numel()))
    for target, part, its_scale in zip(rounded.split(size), x.split(size), scale.split(size), strict=True):
        target.copy_(part.float() / its_scale)
    return rounded


def scaled_grouped_product(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, ends: Tensor
) -> Tensor:
    """Return each expert's product with scales of rows and columns in bf16, by one kernel of an H100.

    Args:
        left: e4m3 [R, K], or [M, R'] to sum over an expert's rows; row after row in memory.
        right: e4m3 [E, K, N], or [R', N]; column after column in memory.
        left_scale: Scales in fp32 of the rows [R], or of each expert's rows [E x M].
        right_scale: Scales in fp32 of the columns [E, N], or [E x N].
        ends: Last row of each expert, exclusive [E], int32.

    Returns:
        [R, N], or [E, M, N].
    """
    return torch._scaled_grouped_mm(
        left, right, left_scale, right_scale, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def scaled_product(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, bias: Tensor | None, *, fast: bool = False
) -> Tensor:
    """Return (left x its scale) (right x its scale)^T + bias in bf16: [M, K], [N, K] in fp8 -> [M, N].

    Args:
        left: First operand, row after row in memory.
        right: Second operand, row after row in memory; e4m3 if `left` is e5m2.
        left_scale: Scale of the first operand, [] or [M, 1], fp32.
        right_scale: Scale of the second operand, [] or [N, 1], fp32.
        bias: Bias [N] in bf16.
        fast: Whether sums may be kept in fewer bits than fp32's.
    """
    return torch._scaled_mm(
        left,
        right.t(),
        left_scale,
        right_scale.t(),
        bias=bias,
        out_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )


def _product_on_cpu(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, bias: Tensor | None
) -> Tensor:
    """Return what `scaled_product` does, by an fp32 product: torch's own takes ten thousand times as long on CPUs."""
    product = linear(left.float(), right.float()) * left_scale * right_scale.t()
    if bias is not None:
        product = product + bias
    return product.to(torch.bfloat16)


FP8_RECIPES: Mapping[str, Fp8Recipe] = MappingProxyType(
    {
        "tensorwise": Fp8Recipe(rowwise=False, gradients=E5M2),
        "rowwise": Fp8Recipe(rowwise=True, gradients=E4M3),
    }
)
