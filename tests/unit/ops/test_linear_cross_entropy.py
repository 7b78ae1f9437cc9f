"""Head and loss in one operation, against the plain words."""

from __future__ import annotations

import sys

import pytest
import torch

from neox.ops import linear_cross_entropy, linear_cross_entropy_reference


@pytest.mark.parametrize(("rows", "vocab"), [(1, 7), (40, 1000), (700, 8192)])
def test_loss_and_gradients_equal_the_reference(rows: int, vocab: int):
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(rows, 24, generator=generator), torch.randn(vocab, 24, generator=generator)
    labels = torch.randint(0, vocab, (rows,), generator=generator)
    token_weights = torch.rand(rows, generator=generator) * (torch.rand(rows, generator=generator) > 0.3)
    results = []
    for function in (linear_cross_entropy, linear_cross_entropy_reference):
        leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        loss = function(*leaves, labels, token_weights)
        (loss * 3.0).backward()
        results.append([loss.detach(), *(leaf.grad for leaf in leaves)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5 * float(theirs.abs().max()) + 1e-6, rtol=1e-5)


def test_bf16_keeps_sums_in_fp32():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3000, 16, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(4096, 16, generator=generator).bfloat16().requires_grad_()
    labels = torch.randint(0, 4096, (3000,), generator=generator)
    ones = torch.ones(3000)
    loss = linear_cross_entropy(x, weight, labels, ones)
    loss.backward()
    assert loss.dtype == torch.float32
    exact = [x.detach().float().requires_grad_(), weight.detach().float().requires_grad_()]
    expected = linear_cross_entropy_reference(*exact, labels, ones)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-3, atol=0)
    for ours, leaf in zip((x.grad, weight.grad), exact, strict=True):
        assert ours.dtype == torch.bfloat16
        assert (ours.float() - leaf.grad).norm() < 0.01 * leaf.grad.norm()


def test_fp16_gradients_do_not_vanish_under_the_weights_of_a_mean():
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(600, 16, generator=generator) * 0.1).half().requires_grad_()
    weight = (torch.randn(3000, 16, generator=generator) * 0.1).half().requires_grad_()
    labels = torch.randint(0, 3000, (600,), generator=generator)
    tiny, scale = torch.full((600,), 2.0**-24), 2.0**20
    (linear_cross_entropy(x, weight, labels, tiny) * scale).backward()
    exact = [x.detach().float().requires_grad_(), weight.detach().float().requires_grad_()]
    (linear_cross_entropy_reference(*exact, labels, tiny) * scale).backward()
    for ours, leaf in zip((x.grad, weight.grad), exact, strict=True):
        assert (ours.float() - leaf.grad).norm() < 0.01 * leaf.grad.norm()


def test_all_weights_zero_give_zero():
    x, weight = torch.randn(5, 4, requires_grad=True), torch.randn(9, 4)
    loss = linear_cross_entropy(x, weight, torch.arange(5), torch.zeros(5))
    loss.backward()
    assert loss == 0.0
    assert not x.grad.any()


def test_without_gradients_only_the_loss_is_computed():
    x, weight, labels = torch.randn(5, 4), torch.randn(9, 4), torch.arange(5)
    with torch.no_grad():
        loss = linear_cross_entropy(x, weight, labels, torch.ones(5))
    torch.testing.assert_close(loss, linear_cross_entropy_reference(x, weight, labels, torch.ones(5)))


def test_without_gradients_there_is_one_product_a_chunk(monkeypatch: pytest.MonkeyPatch):
    module = sys.modules[linear_cross_entropy.__module__]
    products = []
    monkeypatch.setattr(module, "linear", lambda x, w: products.append(1) or torch.nn.functional.linear(x, w))
    x, weight = torch.randn(5, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    with torch.no_grad():
        linear_cross_entropy(x, weight, torch.arange(5), torch.ones(5))
    assert len(products) == 1
    linear_cross_entropy(x, weight, torch.arange(5), torch.ones(5))
    assert len(products) == 4
