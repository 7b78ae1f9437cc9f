"""Attention kinds against one another and against a plain loop; rotary against complex numbers."""

from __future__ import annotations

import math
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F

from neox.ops import (
    ACTIVATIONS,
    VisiblePairs,
    attention_by_chunks,
    core_attention,
    rotary_inv_freq,
    rotary_tables,
    rotate,
    window_rule,
)
from neox.ops.attention import _without_shared_heads


def qkv(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 7, 3, 8, generator=generator).to(dtype) for _ in range(3)]


@pytest.mark.parametrize("impl", ["eager", "flash"])
def test_attention_by_hand(impl: str):
    q, k, v = qkv()
    out = core_attention(q, k, v, impl=impl)
    for row in range(7):
        weights = torch.softmax(torch.einsum("bnd,btnd->bnt", q[:, row], k[:, : row + 1]) / math.sqrt(8), -1)
        torch.testing.assert_close(
            out[:, row], torch.einsum("bnt,btnd->bnd", weights, v[:, : row + 1]), atol=1e-6, rtol=0
        )


@pytest.mark.parametrize("impl", ["eager", "flash"])
def test_scaling_before_and_inside_the_softmax_multiply(impl: str):
    q, k, v = qkv(torch.float32)
    plain = core_attention(q, k, v, impl=impl, scale=0.3)
    torch.testing.assert_close(core_attention(q, k, v, impl=impl, scale=0.1, softmax_scale=3.0), plain)


@pytest.mark.parametrize("impl", ["eager", "flash"])
def test_dropout_runs_inside_the_given_context(impl: str):
    entered = []

    @contextmanager
    def context():
        entered.append(True)
        yield

    q, k, v = qkv(torch.float32)
    dropped = core_attention(q, k, v, impl=impl, dropout_p=0.5, dropout_context=context())
    assert entered
    assert not torch.allclose(dropped, core_attention(q, k, v, impl=impl))


def test_blocks_of_queries_give_the_same_numbers():
    """Causal attention of CPUs up to 512 tokens, forward and backward, over random shapes."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(8):
        batch, length, dim, kv, groups = (int(torch.randint(1, n, (), generator=generator)) for n in (3, 520, 40, 4, 4))
        sizes = [(batch, length, heads, dim) for heads in (kv * groups, kv, kv)]
        inputs = [torch.randn(size, generator=generator).requires_grad_() for size in sizes]
        exact = [x.detach().double().requires_grad_() for x in inputs]
        outputs = []
        for tensors, impl in ((inputs, "flash"), (exact, "eager")):
            out = core_attention(*tensors, impl=impl, scale=0.2, softmax_scale=1.5)
            (out * torch.arange(length).view(1, -1, 1, 1)).sum().backward()
            outputs.append([out, *(x.grad for x in tensors)])
        for ours, expected in zip(*outputs, strict=True):
            torch.testing.assert_close(ours.double(), expected, rtol=1e-4, atol=1e-3 * float(expected.abs().mean()))


def test_rotary_is_a_rotation_of_pairs_and_leaves_the_rest():
    q, k, _ = qkv(torch.float32)
    inv_freq = rotary_inv_freq(4, 10000)
    torch.testing.assert_close(inv_freq, torch.tensor([1.0, 0.01]))
    tables = rotary_tables(inv_freq, torch.arange(7), torch.float32)
    rotated, rotated_k = rotate(q, *tables), rotate(k, *tables)
    turn = torch.polar(torch.ones(7, 2), torch.outer(torch.arange(7.0), inv_freq))[None, :, None]
    for before, after in ((q, rotated), (k, rotated_k)):
        expected = torch.complex(before[..., :2], before[..., 2:4]) * turn
        torch.testing.assert_close(after[..., :2], expected.real)
        torch.testing.assert_close(after[..., 2:4], expected.imag)
        assert torch.equal(after[..., 4:], before[..., 4:])


def test_rotary_positions_may_differ_by_row_and_tables_keep_fp32_angles():
    q, _, _ = qkv(torch.float32)
    inv_freq = rotary_inv_freq(8, 10000)
    positions = torch.stack([torch.arange(7), torch.arange(7) + 1990])
    both = rotate(q, *rotary_tables(inv_freq, positions, torch.float32))
    second = rotate(q[1:], *rotary_tables(inv_freq, positions[1], torch.float32))
    torch.testing.assert_close(both[1:], second)
    cos, _ = rotary_tables(inv_freq, positions, torch.bfloat16)
    exact = (positions[..., None].double() * inv_freq.double()).cos().repeat(1, 1, 2)[:, :, None]
    torch.testing.assert_close(cos.double(), exact, atol=2**-8, rtol=0)


def test_gelus():
    x = torch.linspace(-4, 4, 101, dtype=torch.float64)
    torch.testing.assert_close(ACTIVATIONS["gelu"](x), x * 0.5 * (1 + torch.erf(x / math.sqrt(2))))
    by_hand = 0.5 * (x + 1) * (1 + torch.tanh(0.79788456 * (x + 1) * (1 + 0.044715 * (x + 1) ** 2)))
    torch.testing.assert_close(ACTIVATIONS["gelu_tanh"](x + 1), by_hand, atol=1e-7, rtol=0)


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("mask_heads", [None, 1, 6])
def test_kernels_without_shared_heads_attend_alike(queries: int, mask_heads: int | None):
    """On a GPU a single query's heads become queries of their shared key head, and several queries get copies."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 6, queries, 4, generator=generator)
    k = torch.randn(2, 2, 9, 4, generator=generator)
    v = torch.randn(2, 2, 9, 3, generator=generator)
    mask = None
    if mask_heads is not None:
        mask = torch.rand(2, mask_heads, queries, 9, generator=generator) > 0.3
        mask[..., 0] = True
    found = _without_shared_heads(q, k, v, mask, 0.7, causal=False, dropout_p=0.0)
    expected = F.scaled_dot_product_attention(q, k, v, mask, scale=0.7, enable_gqa=True)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("old", [0, 3])
def test_chunks_of_a_window_equal_all_pairs(old: int, monkeypatch):
    monkeypatch.setattr("neox.ops.attention.MASKED_QUERY_CHUNK", 4)
    generator = torch.Generator().manual_seed(0)
    length = 14
    q = torch.randn(2, 4, length - old, 4, generator=generator)
    k = torch.randn(2, 2, length, 4, generator=generator)
    v = torch.randn(2, 2, length, 4, generator=generator)
    starts = torch.tensor([[0] * length, [0] * 5 + [5] * (length - 5)])
    pairs = VisiblePairs(length, q.device, starts, window_rule(3), 3)
    queries = range(old, length)
    found = attention_by_chunks(q, k, v, pairs, 0.5, queries)
    expected = F.scaled_dot_product_attention(q, k, v, pairs.dense([queries]), scale=0.5, enable_gqa=True)
    torch.testing.assert_close(found, expected)
