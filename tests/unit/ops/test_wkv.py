"""Time mixing of RWKV 6: by chunks it is that of single tokens, and documents in a row are apart."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from neox.ops import wkv_recurrence, wkv_scan

SHAPES = st.fixed_dictionaries(
    {
        "batch": st.integers(1, 2),
        "length": st.sampled_from([1, 5, 16, 17, 40]),
        "heads": st.integers(1, 3),
        "width": st.integers(1, 9),
        "seed": st.integers(0, 1000),
    }
)


def inputs_of(shape: dict[str, int], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Draw receptances, keys, values, log decays from slow ones to such as forget all, and bonuses."""
    generator = torch.Generator().manual_seed(shape["seed"])
    sizes = (shape["batch"], shape["length"], shape["heads"], shape["width"])
    r, k, v, w = (torch.randn(sizes, generator=generator, dtype=dtype) for _ in range(4))
    u = torch.randn(sizes[2:], generator=generator, dtype=dtype)
    return [x.requires_grad_() for x in (r, k, v, -torch.exp(4 * w.detach() - 3), u)]


@given(shape=SHAPES)
@settings(max_examples=20, deadline=None)
def test_chunks_and_single_tokens_agree(shape: dict[str, int]) -> None:
    inputs = inputs_of(shape, torch.float64)
    sizes = (shape["batch"], shape["heads"], shape["width"], shape["width"])
    generator = torch.Generator().manual_seed(1)
    state = torch.randn(sizes, generator=generator, dtype=torch.float64).requires_grad_()
    weights = torch.linspace(0.5, 1.5, inputs[2].numel(), dtype=torch.float64).view(inputs[2].shape)
    found = []
    for function in (wkv_recurrence, wkv_scan):
        outputs, last = function(*inputs, state)
        gradients = torch.autograd.grad((outputs * weights).sum() + last.sum(), [*inputs, state])
        found.append((outputs, last, *gradients))
    torch.testing.assert_close(found[1], found[0], atol=1e-10, rtol=1e-8)


def test_one_step_is_the_formula() -> None:
    r, k, v, w, u = (x.detach() for x in inputs_of({"batch": 1, "length": 2, "heads": 1, "width": 3, "seed": 4}))
    first = torch.outer(k[0, 0, 0], v[0, 0, 0])
    second = torch.outer(k[0, 1, 0], v[0, 1, 0])
    expected = r[0, 1, 0] @ (first + torch.diag(u[0]) @ second)
    outputs, last = wkv_scan(r, k, v, w, u)
    torch.testing.assert_close(outputs[0, 1, 0], expected)
    torch.testing.assert_close(last[0, 0], torch.diag(w[0, 1, 0].exp()) @ first + second)


@given(shape=SHAPES, cuts=st.lists(st.integers(1, 39), max_size=4))
@settings(max_examples=20, deadline=None)
def test_documents_in_a_row_are_apart(shape: dict[str, int], cuts: list[int]) -> None:
    """Each is what it is alone, even if nothing is forgotten; a change of one changes no bit of the next."""
    inputs = [x.detach() for x in inputs_of(shape)]
    inputs[3] = inputs[3].clamp(min=-1.0) * 1e-4
    length = shape["length"]
    bounds = sorted({0, length, *(cut for cut in cuts if cut < length)})
    starts = torch.empty(shape["batch"], length, dtype=torch.long)
    for begin, end in pairwise(bounds):
        starts[:, begin:end] = begin
    found, _ = wkv_scan(*inputs, starts=starts)
    for begin, end in pairwise(bounds):
        alone, _ = wkv_scan(*(x[:, begin:end] for x in inputs[:4]), inputs[4])
        torch.testing.assert_close(found[:, begin:end], alone, atol=1e-5, rtol=1e-5)
    changed = [x.clone() for x in inputs]
    for x in changed[:4]:
        x[:, : bounds[-2]] *= 0.7
    again, _ = wkv_scan(*changed, starts=starts)
    assert torch.equal(again[:, bounds[-2] :], found[:, bounds[-2] :])
