"""Recurrent mixers: chunks of tokens give what one token after another gives, documents are kept apart to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from neox.architecture import BLOCKS
from neox.model import GPT, Context, KVCache, mamba, mamba2
from neox.parallel import ParallelGrid
from tests.plans import NETWORKS, block_kinds_of, small_plan

RECURRENT = [name for name in NETWORKS if any(kind.keeps == "state" for kind in block_kinds_of(NETWORKS[name]))]
Sizes = dict[str, int]


def selective(sizes: Sizes, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """Inputs, steps, decays, vectors B and C and first states of Mamba."""
    batch, length, channels, states = (sizes[name] for name in ("batch", "length", "channels", "states"))
    return (
        torch.randn(batch, length, channels, dtype=dtype),
        torch.rand(batch, length, channels, dtype=dtype),
        -3 * torch.rand(channels, states, dtype=dtype),
        torch.randn(batch, length, states, dtype=dtype),
        torch.randn(batch, length, states, dtype=dtype),
        torch.randn(batch, channels, states, dtype=dtype),
    )


def dual(sizes: Sizes, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """The same of Mamba-2, with heads of 3 channels and two groups."""
    batch, length, states = (sizes[name] for name in ("batch", "length", "states"))
    heads = 2 * sizes["channels"]
    return (
        torch.randn(batch, length, heads, 3, dtype=dtype),
        torch.rand(batch, length, heads, dtype=dtype),
        -3 * torch.rand(heads, dtype=dtype),
        torch.randn(batch, length, 2, states, dtype=dtype),
        torch.randn(batch, length, 2, states, dtype=dtype),
        torch.randn(batch, heads, 3, states, dtype=dtype),
    )


def one_by_one(one_token: Callable[..., tuple[Tensor, Tensor]], inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    x, dt, decay, b, c, state = inputs
    outputs = []
    for token in range(x.shape[1]):
        y, state = one_token(x[:, token], dt[:, token], decay, b[:, token], c[:, token], state)
        outputs.append(y)
    return torch.stack(outputs, dim=1), state


KINDS = {
    "mamba": (selective, mamba.selective_scan, mamba.one_token),
    "mamba2": (dual, mamba2.chunked_scan, mamba2.one_token),
}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25)
@given(
    sizes=st.fixed_dictionaries(
        {
            "batch": st.integers(1, 3),
            "length": st.integers(1, 50),
            "channels": st.integers(1, 5),
            "states": st.integers(1, 7),
        }
    ),
    chunk=st.integers(1, 20),
)
def test_chunks_give_what_one_token_after_another_gives(kind: str, sizes: Sizes, chunk: int) -> None:
    torch.manual_seed(sum(sizes.values()))
    draw, scan, one_token = KINDS[kind]
    inputs = draw(sizes)
    expected, last = one_by_one(one_token, inputs)
    found, found_last = scan(*inputs, None, chunk=chunk)
    bound = 1e-5 * max(1.0, expected.abs().max().item())
    assert (found - expected).abs().max() < bound
    assert (found_last - last).abs().max() < bound


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [4, 64])
def test_gradients_of_chunks_are_those_of_single_tokens(kind: str, chunk: int) -> None:
    torch.manual_seed(3)
    draw, scan, one_token = KINDS[kind]
    inputs = draw({"batch": 2, "length": 21, "channels": 3, "states": 4}, torch.float64)
    for tensor in inputs:
        tensor.requires_grad_()
    results = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        for y, last in (scan(*inputs, None, chunk=chunk), one_by_one(one_token, inputs)):
            results.append(torch.autograd.grad(y.sin().sum() + last.cos().sum(), inputs))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def model_of(name: str, **keys: Any) -> GPT:
    """A model with slow decays: after a row's tokens almost all of a state is left."""
    plan = small_plan(**{"init_method_std": 0.2, **NETWORKS[name], **keys})
    model = GPT(plan, ParallelGrid.single()).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("A_log"):
                parameter.fill_(-12.0)
    return model


@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.parametrize("first", [1, 7, 64, 70])
def test_no_bit_of_a_document_depends_on_the_one_before(name: str, first: int) -> None:
    model = model_of(name, seq_length=96, max_position_embeddings=96)
    tokens = torch.randint(0, 100, (1, 96), generator=torch.Generator().manual_seed(2))
    starts = torch.zeros(1, 96, dtype=torch.long)
    starts[:, first:] = first
    other = tokens.clone()
    other[:, :first] = (other[:, :first] + 31) % 100
    with torch.inference_mode():
        one = model(tokens, Context(document_starts=starts))
        two = model(other, Context(document_starts=starts))
        alone = model(tokens[:, first:])
        together = model(other) - model(tokens)
    assert torch.equal(one[:, first:], two[:, first:])
    assert (one[:, first:] - alone).abs().max() < 1e-4
    assert together[:, -1].abs().max() > 1e-3  # without starts the states reach to the end


@pytest.mark.parametrize("name", RECURRENT)
def test_the_state_does_not_grow_with_the_tokens(name: str) -> None:
    plan = small_plan(**NETWORKS[name])
    model = GPT(plan, ParallelGrid.single())
    sizes = []
    for longest in (16, 32_768):
        cache: KVCache = model.new_cache(3, longest)
        sizes.append({block: sum(t.nbytes for t in tensors) for block, tensors in cache.states.items()})
    assert sizes[0] == sizes[1]
    network = plan.architecture
    for block, held in sizes[0].items():
        assert held == 3 * 4 * BLOCKS[network.attention[block]].kept(network, 1)
