"""Distance from a teacher: losses and gradients of a plain loop over tokens."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from neox.model import LMHead, TeacherLogits
from neox.parallel import ParallelGrid

GRID = ParallelGrid.single()


def plain(
    logits: Tensor, labels: Tensor, weights: Tensor, teacher: TeacherLogits, direction: str, t: float, share: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, divergence and cross entropy in the words of their formulas."""
    kl = logits.new_zeros(())
    entropy = logits.new_zeros(())
    for row, label, weight, ids, values in zip(logits, labels, weights, teacher.ids, teacher.logits, strict=True):
        p = (values.double() / t).softmax(0)
        if direction == "forward":
            log_q = (row / t).log_softmax(0)[ids]
            divergence = sum(a * (a.log() - b) for a, b in zip(p, log_q, strict=True))
        else:
            q = (row[ids] / t).softmax(0)
            divergence = sum(b * (b.log() - a.log()) for a, b in zip(p, q, strict=True))
        kl = kl + weight * t**2 * divergence
        entropy = entropy - weight * row.log_softmax(0)[label]
    return share * kl + (1 - share) * entropy, kl, entropy


@settings(max_examples=25)
@given(
    seed=st.integers(0, 1000),
    direction=st.sampled_from(["forward", "reverse"]),
    t=st.sampled_from([0.5, 1.0, 2.0]),
    share=st.sampled_from([1.0, 0.3]),
    k=st.sampled_from([1, 3, 11]),
)
def test_loss_and_gradients_are_those_of_a_loop(
    seed: int, direction: Literal["forward", "reverse"], t: float, share: float, k: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows, vocab, hidden = 5, 11, 6
    x = torch.randn(1, rows, hidden, generator=generator)
    weight = torch.randn(vocab, hidden, generator=generator)
    labels = torch.randint(0, vocab, (1, rows), generator=generator)
    weights = torch.rand(1, rows, generator=generator)
    ids = torch.stack([torch.randperm(vocab, generator=generator)[:k] for _ in range(rows)]).unsqueeze(0)
    teacher = TeacherLogits(ids, 2 * torch.randn(1, rows, k, generator=generator))
    ours = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    head = LMHead(GRID, ours[1], lambda value: value)
    loss, parts = head.distillation(ours[0], labels, weights, teacher, direction=direction, temperature=t, share=share)
    loss.backward()
    theirs = [x.double().requires_grad_(), weight.double().requires_grad_()]
    flat = TeacherLogits(teacher.ids[0], teacher.logits[0])
    logits = theirs[0][0] @ theirs[1].T
    expected, kl, entropy = plain(logits, labels[0], weights[0].double(), flat, direction, t, share)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6, abs=1e-6)
    assert parts.tolist() == pytest.approx([kl.item(), entropy.item()], rel=1e-6, abs=1e-6)
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own.grad.double(), other.grad, rtol=1e-5, atol=5e-6)


def test_a_model_has_no_distance_from_itself() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 4, 6, generator=generator)
    weight = torch.randn(11, 6, generator=generator)
    logits = x @ weight.T
    for direction in ("forward", "reverse"):
        teacher = TeacherLogits(torch.arange(11).expand(1, 4, 11), logits + 3.0)
        head = LMHead(GRID, weight, lambda value: value)
        labels = torch.zeros(1, 4, dtype=torch.long)
        loss, _ = head.distillation(
            x, labels, torch.ones(1, 4), teacher, direction=direction, temperature=2.0, share=1.0
        )
        assert loss.item() == pytest.approx(0.0, abs=1e-5)
