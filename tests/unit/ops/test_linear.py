"""The oneDNN product is F.linear: values, gradients, shapes, and fp32 exactness."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from neox.ops import linear
from neox.ops.linear import ONEDNN, SMALLEST


@pytest.mark.parametrize("shape", [(8,), (1, 8), (2, 3, 64), (6, 64, 512), (0, 5, 8)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_equals_f_linear_with_gradients(shape: tuple[int, ...], bias: bool, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(0)

    def drawn(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(dtype)

    inputs = [drawn(*shape), drawn(24, shape[-1]), *([drawn(24)] if bias else [])]
    grad = drawn(*shape[:-1], 24)
    results = []
    for function in (linear, F.linear):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = function(*leaves)
        out.backward(grad)
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(
            ours, theirs, atol=2e-5 if dtype == torch.float32 else None, rtol=1e-5 if dtype == torch.float32 else None
        )


@pytest.mark.skipif(not ONEDNN, reason="this torch has no oneDNN, or the CPU is not x86")
def test_products_are_fp32_and_not_rounded_to_less():
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(64, 512, generator=generator), torch.randn(512, 512, generator=generator)
    assert x.numel() * weight.shape[0] >= SMALLEST
    exact = F.linear(x.double(), weight.double())
    error = (linear(x, weight).double() - exact).abs().max() / exact.abs().max()
    assert error < 2e-6  # tf32 and bf16 would be at 1e-3


def test_only_needed_gradients_are_computed():
    x, weight = torch.randn(2, 64, 256), torch.randn(64, 256, requires_grad=True)
    linear(x, weight).sum().backward()
    assert x.grad is None
    torch.testing.assert_close(weight.grad, x.sum((0, 1)).expand(64, 256), atol=1e-4, rtol=1e-4)
