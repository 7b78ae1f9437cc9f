"""Products of sorted rows with the weights of their experts: both ways to compute them, and rows without a place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from neox.ops import FP8_RECIPES, grouped_linear
from neox.ops.grouped_linear import _GroupedProduct, _LoopedProduct, _ScaledGroupedProduct, sort_by_expert
from neox.ops.linear import linear

SHARES = {"equal": [4, 4, 4, 4], "with empty experts": [0, 9, 0, 7], "one expert": [0, 0, 16, 0]}


def operands(device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """Return rows [R, I], weights [E, O, I] and the gradient of the result [R, O] in bf16."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for shape in ((16, 32), (4, 24, 32), (16, 24)):
        made.append(torch.randn(shape, generator=generator).bfloat16().to(device))
    rows, weight, gradient = made
    return rows.requires_grad_(), weight.requires_grad_(), gradient


@pytest.mark.parametrize("shares", SHARES)
def test_one_kernel_and_a_loop_give_the_same(shares: str):
    rows, weight, gradient = operands()
    counts = torch.tensor(SHARES[shares])
    results = []
    looped = _LoopedProduct.apply(rows, weight, counts.tolist(), linear, linear)
    for product in (_GroupedProduct.apply(rows, weight, counts), looped):
        results.append([product, *torch.autograd.grad(product, [rows, weight], gradient)])
    for grouped, looped in zip(*results, strict=True):
        torch.testing.assert_close(grouped, looped, rtol=1.6e-2, atol=1e-2)
    idle = [expert for expert, count in enumerate(SHARES[shares]) if not count]
    assert not results[0][2][idle].any()
    assert not results[1][2][idle].any()


def test_experts_without_rows_have_no_gradient_where_the_kernel_leaves_memory_as_it_was(monkeypatch):
    """As on Blackwell (pytorch#172439)."""
    rows, weight, gradient = operands()
    counts = torch.tensor(SHARES["with empty experts"])
    kernel = torch._grouped_mm

    def careless(*operands: Tensor, offs: Tensor) -> Tensor:
        product = kernel(*operands, offs=offs)
        if product.dim() == 3:
            product[counts == 0] = torch.nan
        return product

    monkeypatch.setattr(torch, "_grouped_mm", careless)
    product = _GroupedProduct.apply(rows, weight, counts)
    of_weight = torch.autograd.grad(product, weight, gradient)[0]
    assert not of_weight[counts == 0].any()


def test_shapes_and_strides_are_those_that_the_kernel_of_gpus_takes():
    rows, weight, gradient = operands("meta")
    product = _GroupedProduct.apply(rows, weight, torch.empty(4, dtype=torch.int64, device="meta"))
    of_rows, of_weight = torch.autograd.grad(product, [rows, weight], gradient)
    assert (product.shape, of_rows.shape, of_weight.shape) == (gradient.shape, rows.shape, weight.shape)


def test_an_experts_rows_keep_their_order_and_later_ones_are_dropped():
    experts = torch.tensor([[1, 0], [1, 2], [0, 1]])
    order = sort_by_expert(experts, 3)
    assert order.token_of_row.tolist() == [0, 2, 0, 1, 2, 1]
    assert order.rows_per_expert.tolist() == [2, 3, 1]
    limited = sort_by_expert(experts, 3, capacity=2)
    assert limited.token_of_row[:5].tolist() == [0, 2, 0, 1, 1]
    assert limited.rows_per_expert.tolist() == [2, 2, 1]
    assert limited.has_row.tolist() == [[True, True], [True, True], [True, False]]
    assert len(sort_by_expert(experts, 3, capacity=1).choice_of_row) == 3  # no more than experts may keep


def test_choices_that_are_not_computed_have_no_row():
    experts = torch.tensor([[1, 0], [1, 2], [0, 1]])
    is_text = torch.tensor([[True], [False], [True]])
    order = sort_by_expert(experts, 3, computed=is_text)
    assert order.token_of_row[:4].tolist() == [0, 2, 0, 2]
    assert order.rows_per_expert.tolist() == [2, 2, 0]
    assert order.has_row.tolist() == [[True, True], [False, False], [True, True]]


def scaled_kernel_of_gpus(left: Tensor, right: Tensor, *scales: Tensor, offs: Tensor, **options: object) -> Tensor:
    """`torch._scaled_grouped_mm` in fp32: its own rules of strides and formats first, then each group's product.

    Groups of a sum begin at 16 bytes. What no group fills is left as it was.
    """
    there = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") for x in (left, right, *scales)]
    shape = KERNEL(*there, offs=offs.to("meta"), **options).shape
    result = torch.full(shape, torch.nan)
    start = 0
    for group, end in enumerate(offs.tolist()):
        if right.dim() == 3:
            product = left[start:end].float() @ right[group].float()
            result[start:end] = product * scales[0][start:end, None] * scales[1][group]
        elif end > start:
            assert start % 16 == end % 16 == 0
            product = left[:, start:end].float() @ right[start:end].float()
            of_rows, of_columns = (scale.view(len(offs), -1)[group] for scale in scales)
            result[group] = product * of_rows[:, None] * of_columns
        start = end
    return result.bfloat16()


KERNEL = torch._scaled_grouped_mm


@pytest.mark.parametrize("beyond", [0, 21])
@pytest.mark.parametrize("shares", [*SHARES.values(), [0, 37, 0, 7], [17, 16, 15, 1]], ids=str)
def test_one_kernel_in_fp8_and_a_loop_give_the_same(shares: list[int], beyond: int, monkeypatch):
    """With rows of no expert, too."""
    monkeypatch.setattr(torch, "_scaled_grouped_mm", scaled_kernel_of_gpus)
    rows, weight, gradient = fp8_operands(sum(shares) + beyond)
    counts = torch.tensor(shares)
    recipe = FP8_RECIPES["rowwise"]
    looped = _LoopedProduct.apply(rows, weight, counts.tolist(), recipe.product, recipe.of_gradient)
    results = []
    for product in (_ScaledGroupedProduct.apply(rows, weight, counts), looped):
        of_rows, of_weight = torch.autograd.grad(product, [rows, weight], gradient)
        results.append([product[: sum(shares)], of_rows[: sum(shares)], of_weight])
    for grouped, one_by_one in zip(*results, strict=True):
        torch.testing.assert_close(grouped, one_by_one, rtol=1.6e-2, atol=1e-6)
    idle = [expert for expert, count in enumerate(shares) if not count]
    assert not results[0][2][idle].any()


def fp8_operands(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows [R, 64], weights [4, 48, 64] and a gradient in bf16, whose rows and experts differ in size."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for shape in ((rows, 64), (4, 48, 64), (rows, 48)):
        sizes = torch.logspace(-2, 1, shape[0]).view(-1, *[1] * (len(shape) - 1))
        made.append((torch.randn(shape, generator=generator) * sizes).bfloat16())
    inputs, weight, gradient = made
    return inputs.requires_grad_(), weight.requires_grad_(), gradient


def test_products_of_experts_in_fp8_are_close_to_the_exact_ones():
    """With the bounds of dense layers; bf16 would be at 1e-6. Evaluations are bf16."""
    shares = [60, 0, 4, 64]
    rows, weight, gradient = fp8_operands(sum(shares))
    counts = torch.tensor(shares)
    product = grouped_linear(rows, weight, counts, FP8_RECIPES["rowwise"])
    found = [product, *torch.autograd.grad(product, [rows, weight], gradient)]
    exact_operands = [rows.detach().double().requires_grad_(), weight.detach().double().requires_grad_()]
    parts = zip(exact_operands[0].split(shares), exact_operands[1], strict=True)
    exact = torch.cat([part @ matrix.t() for part, matrix in parts])
    expected = [exact, *torch.autograd.grad(exact, exact_operands, gradient.double())]
    for ours, theirs in zip(found, expected, strict=True):
        error = (ours.double() - theirs).square().mean() / theirs.square().mean()
        assert 1e-5 < error < 2e-3
    with torch.no_grad():
        evaluated = grouped_linear(rows, weight, counts, FP8_RECIPES["rowwise"])
        assert torch.equal(evaluated, grouped_linear(rows, weight, counts))
