"""Weights of labels, against means written out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from neox.objectives import LOSS_NORMALIZATIONS

MASK = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0]])


@pytest.mark.parametrize(
    ("kind", "amount", "weights"),
    [
        ("micro_batch", None, [[0.2, 0.0, 0.2], [0.0, 0.0, 0.0], [0.2, 0.2, 0.2]]),
        ("tokens", 5.0, [[0.5, 0.0, 0.5], [0.0, 0.0, 0.0], [0.5, 0.5, 0.5]]),
        ("samples", 2.0, [[0.25, 0.0, 0.25], [0.0, 0.0, 0.0], [0.5 / 3, 0.5 / 3, 0.5 / 3]]),
    ],
)
def test_weights(kind: str, amount: float | None, weights: list[list[float]]) -> None:
    normalization = LOSS_NORMALIZATIONS[kind]
    assert normalization.amount(MASK) == amount
    torch.testing.assert_close(normalization.weights(MASK, 0.5), torch.tensor(weights))


@given(st.sampled_from(sorted(LOSS_NORMALIZATIONS)), st.integers(1, 4), st.integers(1, 5))
def test_without_masks_all_are_the_mean(kind: str, samples: int, labels: int) -> None:
    mask = torch.ones(samples, labels)
    normalization = LOSS_NORMALIZATIONS[kind]
    amount = normalization.amount(mask)
    share = 1.0 if amount is None else 1.0 / float(amount)
    torch.testing.assert_close(normalization.weights(mask, share), mask / mask.numel())


@pytest.mark.parametrize("kind", sorted(LOSS_NORMALIZATIONS))
def test_a_micro_batch_without_labels_has_no_loss(kind: str) -> None:
    assert LOSS_NORMALIZATIONS[kind].weights(torch.zeros(2, 3), 0.5).abs().sum() == 0
