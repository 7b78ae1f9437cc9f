"""The product through oneDNN against `F.linear`: values, gradients, shapes, fp32 exactness, and which CPUs take it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from neox.ops import linear
from neox.ops.linear import SMALLEST, _cpu_vendor

MODULE = sys.modules["neox.ops.linear"]  # the package's name `linear` is the function


@pytest.fixture(autouse=True)
def with_onednn(monkeypatch: pytest.MonkeyPatch):
    """Take oneDNN on every CPU."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    monkeypatch.setattr(MODULE, "ONEDNN", True)


@pytest.mark.parametrize("vendor", ["AuthenticAMD", "GenuineIntel"])
def test_the_vendor_is_read_from_the_description_of_the_cpu(tmp_path: Path, vendor: str):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\ncpu family\t: 25\n")
    assert _cpu_vendor(cpuinfo) == vendor


@pytest.mark.parametrize("description", ["", "processor\t: 0\nCPU implementer\t: 0x41\n", None], ids=str)
def test_no_vendor_is_none(tmp_path: Path, description: str | None):
    cpuinfo = tmp_path / "cpuinfo"
    if description is not None:
        cpuinfo.write_text(description)
    assert _cpu_vendor(cpuinfo) == ""


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
