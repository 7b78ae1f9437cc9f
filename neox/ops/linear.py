"""fp32 matrix products on CPUs, by the library that is faster on CPUs of this vendor.

torch multiplies fp32 matrices with MKL, which uses at most AVX2 if the CPU is not Intel's. oneDNN, also part of torch,
uses all instructions that the CPU has. On AMD EPYC (Zen 4 and 5) oneDNN is 1.1 to 2 times as fast; on Intel MKL is
faster. bf16 products always go through oneDNN.

Legend: R rows (all leading dims), I input features, O output features.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from neox.ops.fast_paths import has_fast_path

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(x [R, I], weight [O, I], bias [O] or None) -> [R, O], without a gradient."""


def _cpu_vendor(description: Path = Path("/proc/cpuinfo")) -> str:
    """Return the CPU's vendor as the kernel names it (`AuthenticAMD`, `GenuineIntel`); "" if it names none."""
    try:
        found = re.search(r"^vendor_id\s*:\s*(\S+)", description.read_text(), re.MULTILINE)
    except OSError:
        return ""
    if found is None:
        return ""
    return found[1]


ONEDNN = torch.backends.mkldnn.is_available() and _cpu_vendor() == "AuthenticAMD"
"""Whether oneDNN is the faster library on this CPU."""

SMALLEST = 2**21
"""Multiplications below which the default BLAS is as quick."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + b, as `F.linear` does: x [..., I], weight [O, I], bias [O] -> [..., O].

    The choice depends only on device, dtype, shape and machine, so that a resumed run repeats its numbers bit for bit.
    (torch.compile plans its products by itself and cannot look into oneDNN's.)
    """
    if ONEDNN and _served(x, weight) and not torch.compiler.is_compiling():
        return ProductLinear.apply(x, weight, bias, _multiply, _multiply)
    return F.linear(x, weight, bias)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a^T b to fp32 `total` [O, I], inside the product if the device can: a [R, O], b [R, I]."""
    if a.dtype == total.dtype and not (ONEDNN and _served(a.t(), b.t())):
        total.addmm_(a.t(), b)
    elif has_fast_path("product_added_to_fp32", a.device):
        torch.addmm(total, a.t(), b, total.dtype, out=total)
    else:
        total += linear(a.t(), b.t())


def _served(x: Tensor, weight: Tensor) -> bool:
    """Return whether oneDNN takes the product, and the product is worth its 20 microseconds of preparation."""
    fp32 = x.dtype == torch.float32 == weight.dtype and x.device.type == "cpu"
    return fp32 and x.dim() >= 2 and x.numel() * weight.shape[0] >= SMALLEST


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W^T + b: x [R, I], weight [O, I] -> [R, O]; any strides."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class ProductLinear(torch.autograd.Function):
    """x W^T + b with given products, which are called as `linear` is, with any strides. They record no gradient.

    `product` multiplies inputs and weights; `of_gradient` multiplies the gradient of the output and one of these.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, product: Product, of_gradient: Product
    ) -> Tensor:
        """Multiply: x [..., I], weight [O, I], bias [O] -> [..., O]."""
        # A frozen weight has no gradient, which alone needs the input.
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.shape = x.shape
        ctx.has_bias = bias is not None
        ctx.of_gradient = of_gradient
        result = product(x.flatten(0, -2), weight, bias)
        # Not `view`: autograd forbids in-place work (the all-reduce of tensor ranks) on a view that is made here.
        return torch.ops.aten._unsafe_view(result, (*x.shape[:-1], weight.shape[0]))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients that are needed."""
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        grad_x = None
        grad_weight = None
        grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = ctx.of_gradient(rows, weight.t(), None).view(ctx.shape)
        if ctx.needs_input_grad[1]:
            grad_weight = ctx.of_gradient(rows.t(), x.flatten(0, -2).t(), None)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            grad_bias = rows.sum(0)
        return grad_x, grad_weight, grad_bias, None, None
