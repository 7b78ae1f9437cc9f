"""The convolution of recurrent blocks: that of torch, alone, behind other tokens and in each document of a row."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from neox.ops import causal_convolution


def by_torch(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Convolve with zeros in front of the first token."""
    channels, width = weight.shape
    padded = F.pad(x.transpose(1, 2), (width - 1, 0))
    return F.conv1d(padded, weight.unsqueeze(1), bias, groups=channels).transpose(1, 2)


def inputs_of(length: int, width: int, *, has_bias: bool) -> list[Tensor]:
    torch.manual_seed(length + 10 * width)
    inputs = [torch.randn(2, length, 5, dtype=torch.float64), torch.randn(5, width, dtype=torch.float64)]
    if has_bias:
        inputs.append(torch.randn(5, dtype=torch.float64))
    return [tensor.requires_grad_() for tensor in inputs]


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("length", [1, 3, 4, 9])
def test_values_and_gradients_are_those_of_torch(length: int, width: int, has_bias: bool) -> None:
    inputs = inputs_of(length, width, has_bias=has_bias)
    x, weight, bias = (*inputs, None)[:3]
    found, last = causal_convolution(x, weight, bias)
    expected = by_torch(x, weight, bias)
    torch.testing.assert_close(found, expected)
    for one, other in zip(
        torch.autograd.grad(found.sin().sum(), inputs), torch.autograd.grad(expected.sin().sum(), inputs), strict=True
    ):
        torch.testing.assert_close(one, other)
    assert torch.equal(last, F.pad(x, (0, 0, width - 1, 0))[:, length:])


@pytest.mark.parametrize("cut", [1, 2, 6])
def test_tokens_behind_others_see_these(cut: int) -> None:
    x, weight, bias = inputs_of(9, 4, has_bias=True)
    expected, of_all = causal_convolution(x, weight, bias)
    first, last = causal_convolution(x[:, :cut], weight, bias)
    rest, of_rest = causal_convolution(x[:, cut:], weight, bias, before=last)
    torch.testing.assert_close(torch.cat((first, rest), dim=1), expected)
    assert torch.equal(of_rest, of_all)


def test_a_document_sees_no_other() -> None:
    x, weight, bias = inputs_of(9, 4, has_bias=True)
    positions = torch.tensor([[0, 1, 0, 1, 2, 3, 4, 5, 0], [0, 1, 2, 3, 4, 0, 1, 2, 3]])
    found, _ = causal_convolution(x, weight, bias, positions=positions)
    expected = torch.stack(
        [
            torch.cat([by_torch(part[None], weight, bias)[0] for part in row.split(lengths)])
            for row, lengths in zip(x, ([2, 6, 1], [5, 4]), strict=True)
        ]
    )
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(y.sin().sum(), (x, weight, bias)) for y in (found, expected)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)
