"""Products of sorted rows with the weights of their experts: both ways to compute them, and rows without a place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from neox.ops.grouped_linear import _GroupedProduct, _LoopedProduct, sort_by_expert

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
    for product in (_GroupedProduct.apply(rows, weight, counts), _LoopedProduct.apply(rows, weight, counts.tolist())):
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
