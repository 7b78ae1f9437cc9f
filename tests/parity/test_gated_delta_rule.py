"""The gated delta rule: by chunks and token by token it is that of transformers, and documents in a row are apart."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from neox.ops import gated_delta_recurrence, gated_delta_scan
from tests.transformers_versions import of_the_locked_version


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, int]:
    groups = draw(st.integers(1, 3))
    return {
        "batch": draw(st.integers(1, 2)),
        "length": draw(st.sampled_from([1, 2, 15, 64, 65, 130])),
        "groups": groups,
        "heads": groups * draw(st.integers(1, 3)),
        "key_width": draw(st.integers(1, 12)),
        "value_width": draw(st.integers(1, 12)),
        "seed": draw(st.integers(0, 1000)),
    }


def inputs_of(shape: dict[str, int], *, slowest: float = 0.0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Draw queries, keys, values, log decays from -1 to -`slowest`, and strengths from 0 to 2."""
    generator = torch.Generator().manual_seed(shape["seed"])
    tokens = (shape["batch"], shape["length"])
    q, k = (
        torch.randn(*tokens, shape["groups"], shape["key_width"], generator=generator, dtype=dtype) for _ in range(2)
    )
    v = torch.randn(*tokens, shape["heads"], shape["value_width"], generator=generator, dtype=dtype)
    decay, strength = (torch.rand(*tokens, shape["heads"], generator=generator, dtype=dtype) for _ in range(2))
    return [x.requires_grad_() for x in (q, k, v, -decay - slowest, 2 * strength)]


def state_of(shape: dict[str, int]) -> Tensor:
    generator = torch.Generator().manual_seed(shape["seed"] + 1)
    sizes = (shape["batch"], shape["heads"], shape["key_width"], shape["value_width"])
    return torch.randn(sizes, generator=generator)


def theirs(function: Any, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, strength: Tensor, state: Tensor) -> Any:
    settings: dict[str, Any] = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    return function(q, k, v, g=decay, beta=strength, **settings)


@of_the_locked_version
@given(shape=shapes())
@settings(max_examples=25, deadline=None)
def test_both_forms_are_those_of_transformers(shape: dict[str, int]) -> None:
    inputs = inputs_of(shape)
    state = state_of(shape)
    expected = theirs(torch_recurrent_gated_delta_rule, *inputs, state)
    # A head of width 1 reads what it wrote at every token, so that rounding grows with the largest state, not with
    # the number that is compared.
    largest = max(1.0, *(float(x.detach().abs().max()) for x in expected))
    for found in (
        gated_delta_recurrence(*inputs, state),
        gated_delta_scan(*inputs, state),
        theirs(torch_chunk_gated_delta_rule, *inputs, state),
    ):
        torch.testing.assert_close(found, expected, atol=1e-5 * largest, rtol=1e-5)


@given(shape=shapes())
@settings(max_examples=15, deadline=None)
def test_gradients_are_those_of_single_steps(shape: dict[str, int]) -> None:
    inputs = inputs_of(shape, dtype=torch.float64)
    state = state_of(shape).double().requires_grad_()
    weights = torch.linspace(0.5, 1.5, inputs[2].numel(), dtype=torch.float64).view(inputs[2].shape)
    gradients = []
    for function in (gated_delta_recurrence, gated_delta_scan):
        outputs, last = function(*inputs, state)
        total = (outputs * weights).sum() + last.sum()
        gradients.append(torch.autograd.grad(total, [*inputs, state]))
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-9, rtol=1e-7)


@given(shape=shapes(), cut=st.integers(1, 129))
@settings(max_examples=15, deadline=None)
def test_a_state_goes_on(shape: dict[str, int], cut: int) -> None:
    inputs = inputs_of(shape, dtype=torch.float64)
    whole, last = gated_delta_scan(*inputs)
    cut = min(cut, shape["length"])
    first, state = gated_delta_scan(*(x[:, :cut] for x in inputs))
    torch.testing.assert_close(first, whole[:, :cut], atol=1e-9, rtol=1e-9)
    if cut < shape["length"]:
        second, state = gated_delta_recurrence(*(x[:, cut:] for x in inputs), state)
        torch.testing.assert_close(second, whole[:, cut:], atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(state, last, atol=1e-9, rtol=1e-9)


@given(shape=shapes(), cuts=st.lists(st.integers(1, 129), max_size=4))
@settings(max_examples=25, deadline=None)
def test_documents_in_a_row_are_apart(shape: dict[str, int], cuts: list[int]) -> None:
    """Each is what it is alone, even if little is forgotten; a change of one changes no bit of the next."""
    inputs = [x.detach() for x in inputs_of(shape, dtype=torch.float64)]
    inputs[3] *= 1e-4
    length = shape["length"]
    bounds = sorted({0, length, *(cut for cut in cuts if cut < length)})
    starts = torch.empty(shape["batch"], length, dtype=torch.long)
    for begin, end in pairwise(bounds):
        starts[:, begin:end] = begin
    found, _ = gated_delta_scan(*inputs, starts=starts)
    for begin, end in pairwise(bounds):
        alone, _ = gated_delta_scan(*(x[:, begin:end] for x in inputs))
        torch.testing.assert_close(found[:, begin:end], alone, atol=1e-9, rtol=1e-9)
    changed = [x.clone() for x in inputs]
    for x in changed:
        x[:, : bounds[-2]] *= 0.7
    again, _ = gated_delta_scan(*changed, starts=starts)
    assert torch.equal(again[:, bounds[-2] :], found[:, bounds[-2] :])
