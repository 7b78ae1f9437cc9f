"""Masks by block of FlexAttention against dense masks, and its numbers against blocks of queries."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch._dynamo.utils import counters

from neox.architecture.sparsity import settings_of, sparsity_of
from neox.ops import VisiblePairs, block_layout, block_mask_of, core_attention, sparse_rule, window_rule
from neox.ops.flex import block_mask_by, compiled_attention, compiled_block_mask

LENGTH = 300
CPU = torch.device("cpu")
DOCUMENTS = torch.tensor([[0] * 100 + [100] * 200, [0] * 299 + [299]])


def described(kind: str) -> VisiblePairs:
    """Pairs of one kind in two rows of `LENGTH` tokens."""
    if kind == "window":
        return VisiblePairs(LENGTH, CPU, rule=window_rule(40), reach=40)
    if kind == "documents":
        return VisiblePairs(LENGTH, CPU, DOCUMENTS)
    settings = settings_of(kind, sparsity_of({kind}, {"block": 16, "different_layout_per_head": True}))
    layout = block_layout(kind, settings, blocks=19, heads=range(4), layer=0)
    return VisiblePairs(LENGTH, CPU, DOCUMENTS, sparse_rule(layout, 16), rule_heads=layout.shape[0])


@pytest.mark.parametrize("kind", ["window", "documents", "bigbird", "local"])
def test_blocks_hold_the_pairs_of_the_dense_mask(kind: str) -> None:
    pairs = described(kind)
    mask = block_mask_of(pairs)
    dense = pairs.dense()
    padded = torch.zeros(*dense.shape[:2], 384, 384, dtype=torch.bool)
    padded[..., :LENGTH, :LENGTH] = dense
    tiles = padded.unflatten(-1, (3, 128)).unflatten(-3, (3, 128))  # [rows, heads, 3, 128, 3, 128]
    assert torch.equal(mask.to_dense().bool(), tiles.any(dim=(-3, -1)))


@pytest.mark.parametrize("kind", ["window", "documents", "bigbird", "local"])
@torch.no_grad()
def test_attention_by_block_masks_equals_blocks_of_queries(kind: str) -> None:
    """The forward pass only: FlexAttention has no backward pass on CPUs."""
    pairs = described(kind)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, LENGTH, heads, 16, generator=generator) for heads in (4, 2, 2))
    blocks = core_attention(q, k, v, impl="flash", scale=0.3, pairs=pairs)
    flex = core_attention(q, k, v, impl="flash", scale=0.3, pairs=pairs, block_mask=block_mask_of(pairs))
    torch.testing.assert_close(flex, blocks)


@pytest.mark.parametrize("kind", ["window", "documents", "bigbird"])
@torch.no_grad()
def test_queries_of_two_runs_get_their_rows_of_the_result(kind: str) -> None:
    """As on a context rank, which has an early and a late part of the queries."""
    pairs = described(kind)
    runs = (range(30, 60), range(240, 270))
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, LENGTH, heads, 16, generator=generator) for heads in (4, 2, 2))
    whole = core_attention(q, k, v, impl="flash", pairs=pairs)
    own = pairs.indices(runs)
    mask = block_mask_of(pairs, runs)
    assert mask.shape[-2:] == (60, LENGTH)
    for block_mask in (None, mask):
        part = core_attention(q[:, own], k, v, impl="flash", pairs=pairs, queries=runs, block_mask=block_mask)
        torch.testing.assert_close(part, whole[:, own])
    dense = core_attention(q[:, own], k, v, impl="eager", pairs=pairs, queries=runs)
    torch.testing.assert_close(dense, whole[:, own])


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("c++") or shutil.which("g++")), reason="torch.compile needs a C++ compiler")
@torch.no_grad()
def test_compiled_masks_and_attention_serve_all_batches() -> None:
    """What GPUs run, compiled for the CPU: one graph for the masks of any documents, and one for attention."""
    counters.clear()
    generator = torch.Generator().manual_seed(0)
    for starts in (DOCUMENTS, DOCUMENTS.flip(0)):
        pairs = VisiblePairs(LENGTH, CPU, starts, window_rule(40), 40)
        mask = block_mask_by(compiled_block_mask(), pairs)
        assert torch.equal(mask.to_dense(), block_mask_of(pairs).to_dense())
        q, k, v = (torch.randn(2, heads, LENGTH, 16, generator=generator) for heads in (4, 2, 2))
        flex = compiled_attention()(q, k, v, block_mask=mask, scale=0.3, enable_gqa=True)
        blocks = core_attention(*(x.transpose(1, 2) for x in (q, k, v)), impl="flash", scale=0.3, pairs=pairs)
        torch.testing.assert_close(flex.transpose(1, 2), blocks)
    assert counters["stats"]["unique_graphs"] == 2
