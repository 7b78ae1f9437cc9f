"""Kinds of attention: what a query sees, with and without a cache, padding and packed documents."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from neox.architecture import SPARSITY, settings_of
from neox.config import NeoXConfig
from neox.config.validation import notes_without_effect, static_problems
from neox.errors import ConfigError
from neox.model import GPT
from neox.ops import block_layout, sparse_pairs
from neox.parallel import ParallelGrid
from tests.plans import SMALL, small_plan

TOKENS = torch.randint(0, 100, (2, 16), generator=torch.Generator().manual_seed(0))
SETTINGS: dict[str, dict[str, Any]] = {
    "local": {"num_local_blocks": 2},
    "sparse_fixed": {"num_local_blocks": 2, "different_layout_per_head": True, "num_different_global_patterns": 2},
    "sparse_variable": {"num_random_blocks": 1, "local_window_blocks": [1, 2], "different_layout_per_head": True},
    "bigbird": {"num_sliding_window_blocks": 1, "different_layout_per_head": True},
    "bslongformer": {"num_sliding_window_blocks": 2, "global_block_indices": [1]},
}


def sparse_model(kind: str, **keys: Any) -> GPT:
    kinds, settings = [kind, "global"], {"block": 2, **SETTINGS[kind]}
    return GPT(small_plan(attention_config=kinds, sparsity_config=settings, **keys), ParallelGrid.single()).eval()


@pytest.mark.parametrize("kind", SPARSITY)
@torch.no_grad()
def test_a_sparse_layer_is_the_softmax_over_the_pairs_of_its_layout(kind: str) -> None:
    model = sparse_model(kind)
    attention = model.blocks[0].attention
    x = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(1))
    q, k, v = attention.query_key_value(x).view(2, 16, 4, 3, 8).unbind(3)
    q, k = attention.rotary_emb(
        torch.stack([q, k], 3), attention.position_tables(torch.arange(16), 16, x.dtype)
    ).unbind(3)
    settings = settings_of(kind, model.architecture.sparsity)
    layout = block_layout(kind, settings, blocks=8, heads=range(4), layer=0)
    seen = sparse_pairs(layout, 2, torch.arange(16), torch.arange(16))
    assert not torch.equal(seen.expand(1, 4, 16, 16), torch.ones(1, 4, 16, 16).tril().bool()), "hides nothing"
    scores = torch.einsum("bsnd,btnd->bnst", q, k) / 8**0.5
    expected = torch.einsum("bnst,btnd->bsnd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v).reshape(2, 16, 32)
    torch.testing.assert_close(attention(x), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", SPARSITY)
@torch.no_grad()
def test_a_cache_and_left_padding_give_the_logits_of_each_row_alone(kind: str) -> None:
    model = sparse_model(kind)
    rows = [TOKENS[0, :13], TOKENS[1, :8]]
    cache = model.new_cache(batch=2, max_length=16)
    cache.reset(start=torch.tensor([0, 5]))
    logits = [model(torch.stack([rows[0][:11], torch.cat([torch.zeros(5, dtype=torch.long), rows[1][:6]])]), cache)]
    logits += [model(torch.stack([rows[0][i : i + 1], rows[1][i - 5 : i - 4]]), cache) for i in (11, 12)]
    for padded, row in zip(torch.cat(logits, dim=1), rows, strict=True):
        torch.testing.assert_close(padded[-len(row) :], model(row.unsqueeze(0))[0], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", SPARSITY)
@torch.no_grad()
def test_a_packed_row_gives_the_logits_of_its_documents_alone(kind: str) -> None:
    model = sparse_model(kind)
    starts = torch.tensor([0] * 7 + [7] * 9)
    packed = model(TOKENS, document_starts=starts.expand(2, -1))
    torch.testing.assert_close(packed[:, :7], model(TOKENS[:, :7]), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(packed[:, 7:], model(TOKENS[:, 7:]), atol=1e-6, rtol=1e-5)


def test_settings_are_checked_and_those_without_effect_are_named() -> None:
    keys = {**SMALL, "attention_config": ["sparse_fixed", "global"]}
    with pytest.raises(ConfigError, match="no key `blok`"):
        NeoXConfig.from_flat({**keys, "sparsity_config": {"blok": 8}})
    (problem,) = static_problems(NeoXConfig.from_flat({**keys, "sparsity_config": {"block": 5}}))
    assert "seq_length" in problem
    assert "multiple of sparsity_config.block" in problem
    bad = NeoXConfig.from_flat({**keys, "sparsity_config": {"num_global_blocks": 3}})
    assert any("num_global_blocks" in problem for problem in static_problems(bad))
    given = NeoXConfig.from_flat({**keys, "sparsity_config": {"num_random_blocks": 3, "num_local_blocks": 2}})
    (note,) = notes_without_effect(given)
    assert "num_random_blocks" in note
    assert "bigbird" in note
