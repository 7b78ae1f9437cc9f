"""Head and loss in one operation, against the plain words; over tensor ranks in tests/distributed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from neox.model import cross_entropy, head_cross_entropy, head_loss_parts, vocab_parallel_cross_entropy
from neox.model.cross_entropy import head_log_probs
from neox.parallel import ParallelGrid
from tests.errors import raises_naming
from tests.losses import cross_entropy_reference

GRID = ParallelGrid.single()


@pytest.mark.parametrize(("rows", "vocab"), [(1, 7), (40, 1000), (700, 8192)])
@pytest.mark.parametrize("biased", [False, True])
def test_loss_and_gradients_equal_the_reference(rows: int, vocab: int, biased: bool):
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(rows, 24, generator=generator), torch.randn(vocab, 24, generator=generator)
    bias = torch.randn(vocab, generator=generator)
    labels = torch.randint(0, vocab, (rows,), generator=generator)
    token_weights = torch.rand(rows, generator=generator) * (torch.rand(rows, generator=generator) > 0.3)
    results = []
    for ours in (True, False):
        leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        added = bias.clone().requires_grad_() if biased else None
        if ours:
            loss = head_cross_entropy(*leaves, labels, token_weights, GRID, bias=added)
        else:
            loss = cross_entropy_reference(*leaves, labels, token_weights, added)
        (loss * 3.0).backward()
        results.append([loss.detach(), *(leaf.grad for leaf in leaves), *([added.grad] if biased else [])])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6 * float(theirs.abs().max()) + 1e-6, rtol=1e-5)


def test_the_z_loss_is_apart_and_has_the_gradient_of_its_formula():
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(40, 24, generator=generator), torch.randn(1000, 24, generator=generator)
    labels = torch.randint(0, 1000, (40,), generator=generator)
    token_weights = torch.rand(40, generator=generator) / 40
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    trained, lm_loss, z_loss = head_loss_parts(*leaves, labels, token_weights, GRID, z_coefficient=0.01)
    trained.backward()
    theirs = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    log_sums = (theirs[0] @ theirs[1].T).logsumexp(-1)
    expected_z = 0.01 * (log_sums.square() * token_weights).sum()
    expected_lm = cross_entropy_reference(*theirs, labels, token_weights, None)
    (expected_lm + expected_z).backward()
    torch.testing.assert_close(lm_loss, expected_lm.detach())
    torch.testing.assert_close(z_loss, expected_z.detach())
    torch.testing.assert_close(trained.detach(), lm_loss + z_loss)
    assert not lm_loss.requires_grad
    for ours, other in zip(leaves, theirs, strict=True):
        torch.testing.assert_close(ours.grad, other.grad, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("z_coefficient", [0.0, 0.01])
def test_bounded_logits_are_those_of_the_loss_its_gradient_and_log_probabilities(z_coefficient: float):
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(40, 24, generator=generator), torch.randn(1000, 24, generator=generator)
    labels = torch.randint(0, 1000, (40,), generator=generator)
    token_weights = torch.rand(40, generator=generator) / 40
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    loss = head_loss_parts(*leaves, labels, token_weights, GRID, softcap=3.0, z_coefficient=z_coefficient).trained
    loss.backward()
    theirs = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    logits = 3.0 * torch.tanh(theirs[0] @ theirs[1].T / 3.0)
    log_probs = logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    z_loss = z_coefficient * (logits.logsumexp(-1).square() * token_weights).sum()
    expected = z_loss - (log_probs * token_weights).sum()
    expected.backward()
    torch.testing.assert_close(loss.detach(), expected.detach())
    for ours, other in zip(leaves, theirs, strict=True):
        torch.testing.assert_close(ours.grad, other.grad, atol=1e-6, rtol=1e-5)
    found = head_log_probs(x, weight, labels, GRID, softcap=3.0)
    torch.testing.assert_close(found, log_probs.detach(), atol=1e-6, rtol=1e-5)


def test_bf16_keeps_sums_in_fp32():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3000, 16, generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(4096, 16, generator=generator).bfloat16().requires_grad_()
    labels = torch.randint(0, 4096, (3000,), generator=generator)
    ones = torch.ones(3000)
    loss = head_cross_entropy(x, weight, labels, ones, GRID)
    loss.backward()
    assert loss.dtype == torch.float32
    exact = [x.detach().float().requires_grad_(), weight.detach().float().requires_grad_()]
    expected = cross_entropy_reference(*exact, labels, ones)
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
    (head_cross_entropy(x, weight, labels, tiny, GRID) * scale).backward()
    exact = [x.detach().float().requires_grad_(), weight.detach().float().requires_grad_()]
    (cross_entropy_reference(*exact, labels, tiny) * scale).backward()
    for ours, leaf in zip((x.grad, weight.grad), exact, strict=True):
        assert (ours.float() - leaf.grad).norm() < 0.01 * leaf.grad.norm()


def test_all_weights_zero_give_zero():
    x, weight = torch.randn(5, 4, requires_grad=True), torch.randn(9, 4)
    loss = head_cross_entropy(x, weight, torch.arange(5), torch.zeros(5), GRID)
    loss.backward()
    assert loss == 0.0
    assert not x.grad.any()


def test_without_gradients_only_the_loss_is_computed():
    x, weight, labels = torch.randn(5, 4), torch.randn(9, 4), torch.arange(5)
    with torch.no_grad():
        loss = head_cross_entropy(x, weight, labels, torch.ones(5), GRID)
    torch.testing.assert_close(loss, cross_entropy_reference(x, weight, labels, torch.ones(5)))


def test_a_second_backward_pass_is_refused():
    x = torch.randn(5, 4, requires_grad=True)
    loss = head_cross_entropy(x, torch.randn(9, 4), torch.arange(5), torch.ones(5), GRID)
    loss.backward(retain_graph=True)
    with raises_naming(AssertionError, "second backward"):
        loss.backward()


def test_no_gradient_is_computed_for_what_needs_none(monkeypatch: pytest.MonkeyPatch):
    products = []
    monkeypatch.setattr(cross_entropy, "linear", lambda x, w: products.append("linear") or F.linear(x, w))
    monkeypatch.setattr(cross_entropy, "add_product", lambda *tensors: products.append("add"))
    x, weight = torch.randn(5, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    with torch.no_grad():
        head_cross_entropy(x, weight, torch.arange(5), torch.ones(5), GRID)
    assert products == ["linear"]
    head_cross_entropy(x, weight, torch.arange(5), torch.ones(5), GRID)
    assert products == ["linear", "linear", "linear", "add"]
    head_cross_entropy(x, weight.detach(), torch.arange(5), torch.ones(5), GRID)
    assert products[4:] == ["linear", "linear"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_equal_torchs(dtype: torch.dtype):
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(2, 600, 1000, generator=generator) * 5).to(dtype)
    labels = torch.randint(0, 1000, (2, 600), generator=generator)
    expected = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
    torch.testing.assert_close(vocab_parallel_cross_entropy(logits, labels, GRID), expected)
    large = torch.tensor([[[1e4, -1e4, 0.0]]])
    assert vocab_parallel_cross_entropy(large, torch.tensor([[2]]), GRID).item() == 1e4
