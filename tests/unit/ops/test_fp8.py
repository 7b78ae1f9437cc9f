"""Linear layers in fp8: torch's scaled product against its imitation, gradients, shapes, scales, and GPUs' rules."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from neox.config.sections.training import TrainingConfig
from neox.ops import FP8_RECIPES
from neox.ops.fp8 import E4M3, E5M2, _product_on_cpu, scaled_product

RECIPES = pytest.mark.parametrize("name", FP8_RECIPES)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Values whose rows differ in size, as activations do."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (values * torch.logspace(-2, 1, shape[0])[(..., *[None] * (len(shape) - 1))]).bfloat16()


def rounded(x: Tensor, rowwise: bool, kind: torch.dtype) -> Tensor:
    """x in fp32 after fp8's rounding, by its definition: bits of the fraction, and the smallest step."""
    bits, lowest, largest = {E4M3: (3, -6, 448.0), E5M2: (2, -14, 57344.0)}[kind]
    x = x.float()
    scale = (x.abs().amax(-1, keepdim=True) if rowwise else x.abs().amax()) / largest
    scaled = x / scale
    step = torch.exp2(torch.floor(torch.log2(scaled.abs().clamp(min=2.0**lowest))) - bits)
    return torch.round(scaled / step) * step * scale


def expected(x: Tensor, weight: Tensor, bias: Tensor | None, grad: Tensor, name: str) -> list[Tensor]:
    """Output and gradients by fp32 products of rounded operands."""
    recipe, rows, grads = FP8_RECIPES[name], x.flatten(0, -2), grad.flatten(0, -2)

    def product(a: Tensor, b: Tensor, kind: torch.dtype) -> Tensor:
        return rounded(a, recipe.rowwise, kind) @ rounded(b, recipe.rowwise, E4M3).t()

    y = product(rows, weight, E4M3) + (0 if bias is None else bias.float())
    results = [
        y.view(grad.shape),
        product(grads, weight.t(), recipe.gradients).view(x.shape),
        product(grads.t(), rows.t(), recipe.gradients),
    ]
    return results if bias is None else [*results, grads.float().sum(0)]


@RECIPES
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 16), (16, 32), (3, 7, 48), (2, 40, 64)])
def test_equals_products_of_rounded_operands(name: str, bias: bool, shape: tuple[int, ...]):
    leaves = [drawn(*shape), drawn(32, shape[-1], seed=1), *([drawn(32, seed=2)] if bias else [])]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    grad = drawn(*shape[:-1], 32, seed=3)
    y = FP8_RECIPES[name].linear(*leaves)
    y.backward(grad)
    with torch.no_grad():
        wanted = expected(leaves[0], leaves[1], leaves[2] if bias else None, grad, name)
    for ours, theirs in zip([y.detach(), *(leaf.grad for leaf in leaves)], wanted, strict=True):
        torch.testing.assert_close(ours.float(), theirs, atol=8e-3 * float(theirs.abs().max()), rtol=8e-3)


@RECIPES
def test_is_close_to_the_exact_product(name: str):
    x, weight = drawn(64, 256).requires_grad_(), drawn(128, 256, seed=1).requires_grad_()
    exact = F.linear(x.double(), weight.double())
    error = (FP8_RECIPES[name].linear(x, weight).double() - exact).square().mean() / exact.square().mean()
    assert 1e-5 < error < 2e-3  # bf16 would be at 1e-6


@pytest.mark.parametrize("kind", [E4M3, E5M2])
@pytest.mark.parametrize("rowwise", [False, True])
@pytest.mark.parametrize("bias", [True, False])
def test_torch_scales_as_the_imitation_does(kind: torch.dtype, rowwise: bool, bias: bool):
    if rowwise and torch.__version__.startswith("2.11."):
        pytest.skip("torch 2.11 has no scales of rows on a CPU")
    left, right = drawn(5, 32).to(kind), drawn(16, 32, seed=1).to(E4M3)
    scales = [drawn(rows, 1, seed=2).float().abs() for rows in (5, 16)]
    scales = scales if rowwise else [scale[0, 0] for scale in scales]
    extra = drawn(16, seed=3) if bias else None
    ours, theirs = (product(left, right, *scales, extra) for product in (_product_on_cpu, scaled_product))
    torch.testing.assert_close(ours, theirs, atol=1e-2 * float(theirs.abs().max()), rtol=1e-2)


@pytest.mark.slow
@RECIPES
@pytest.mark.parametrize("rows", [16, 21])
def test_calls_what_gpus_accept(name: str, rows: int, monkeypatch: pytest.MonkeyPatch):
    """torch's rules of layouts, formats and multiples on CUDA: each product again on tensors there without memory."""
    calls: list[torch.Size] = []

    def on_gpu(*operands: Tensor | None) -> Tensor:
        with FakeTensorMode():
            there = [
                None if x is None else torch.empty_strided(x.shape, x.stride(), device="cuda", dtype=x.dtype)
                for x in operands
            ]
            calls.append(scaled_product(*there).shape)
        return imitation(*operands)

    imitation = _product_on_cpu
    monkeypatch.setattr("neox.ops.fp8._product_on_cpu", on_gpu)
    leaves = [x.requires_grad_() for x in (drawn(rows, 32), drawn(48, 32, seed=1), drawn(48, seed=2))]
    FP8_RECIPES[name].linear(*leaves).sum().backward()
    assert calls == [(rows, 48), (rows, 32), (48, 32)]
    with pytest.raises(RuntimeError, match="divisible by 16"):  # the rules are checked at all
        FP8_RECIPES[name].linear(leaves[0], drawn(40, 32))


@RECIPES
def test_zeros_and_tiny_values_stay_finite(name: str):
    for value in (0.0, 1e-38, 1e30):
        x = torch.full((16, 16), value, dtype=torch.bfloat16, requires_grad=True)
        y = FP8_RECIPES[name].linear(x, torch.eye(16, dtype=torch.bfloat16))
        y.sum().backward()
        assert y.isfinite().all()
        assert x.grad.isfinite().all()
    torch.testing.assert_close(y, x)


@RECIPES
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_is_seen(name: str, value: float):
    x = drawn(16, 16)
    x[3, 5] = value
    assert not FP8_RECIPES[name].linear(x.requires_grad_(), drawn(16, 16, seed=1)).isfinite().all()


@RECIPES
def test_without_gradients_it_is_bf16(name: str):
    x, weight = drawn(4, 16), drawn(8, 16, seed=1)
    with torch.no_grad():
        assert torch.equal(FP8_RECIPES[name].linear(x, weight), F.linear(x, weight))


def test_the_key_names_the_recipes():
    names = [get_args(option) for option in get_args(TrainingConfig.model_fields["fp8"].annotation)]
    assert set(names[0]) == {*FP8_RECIPES}
