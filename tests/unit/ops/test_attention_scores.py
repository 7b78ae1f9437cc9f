"""The largest score of attention, against all scores at once."""

import math

import pytest
import torch

from neox.ops import largest_score


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("length", "heads", "kv_heads"), [(7, 4, 4), (300, 4, 2), (513, 3, 1)])
def test_equals_the_largest_of_all_scores(causal, length, heads, kv_heads):
    generator = torch.Generator().manual_seed(length)
    q = torch.randn(2, length, heads, 8, generator=generator)
    k = torch.randn(2, length, kv_heads, 8, generator=generator)
    k[:, -1] *= 10.0  # the largest scores are those of the last key, which only the last query sees if causal
    scores = torch.einsum("bsnd,btnd->bnst", q, k.repeat_interleave(heads // kv_heads, dim=2)) * 0.3
    if causal:
        scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -math.inf)
    assert largest_score(q, k, 0.3, causal=causal).item() == pytest.approx(scores.max().item(), rel=1e-5)
