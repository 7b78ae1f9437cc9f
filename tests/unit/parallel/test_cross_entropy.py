"""The chunked cross entropy against torch's, on one rank; over ranks in tests/distributed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from neox.parallel import ParallelGrid, vocab_parallel_cross_entropy


@pytest.mark.parametrize("shape", [(1, 1, 7), (3, 50, 1000), (2, 600, 1000)])
def test_equals_torch_with_gradients(shape: tuple[int, int, int]):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(shape, generator=generator) * 5
    labels = torch.randint(0, shape[-1], shape[:2], generator=generator)
    weights = torch.rand(shape[:2], generator=generator)
    ours, theirs = (logits.clone().requires_grad_() for _ in range(2))
    losses = vocab_parallel_cross_entropy(ours, labels, ParallelGrid.single())
    expected = F.cross_entropy(theirs.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
    torch.testing.assert_close(losses, expected)
    (losses * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_bf16_logits_give_the_fp32_loss_of_their_values():
    logits = (torch.randn(2, 5, 300, generator=torch.Generator().manual_seed(0)) * 5).bfloat16().requires_grad_()
    labels = torch.arange(10).view(2, 5)
    losses = vocab_parallel_cross_entropy(logits, labels, ParallelGrid.single())
    assert losses.dtype == torch.float32
    exact = F.cross_entropy(logits.detach().float().flatten(0, 1), labels.flatten(), reduction="none")
    torch.testing.assert_close(losses.flatten(), exact)
    losses.sum().backward()
    assert logits.grad.dtype == torch.bfloat16


def test_large_logits_do_not_overflow():
    logits = torch.tensor([[[1e4, -1e4, 0.0]]], requires_grad=True)
    loss = vocab_parallel_cross_entropy(logits, torch.tensor([[2]]), ParallelGrid.single())
    loss.sum().backward()
    assert loss.item() == 1e4
    assert logits.grad.tolist() == [[[1.0, 0.0, -1.0]]]
