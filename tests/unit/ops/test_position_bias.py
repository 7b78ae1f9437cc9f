"""ALiBi's slopes and T5's buckets are those of their papers."""

from __future__ import annotations

import math

import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention

from neox.ops import alibi_slopes, relative_buckets


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 5, 7, 8, 12, 16, 20, 24, 33, 64, 71, 112])
def test_slopes_are_blooms(heads):
    alibi = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)  # [heads, 1, 2]: slope times position
    assert alibi_slopes(heads) == pytest.approx(alibi[:, 0, 1].tolist(), rel=1e-6)
    power = 2 ** math.floor(math.log2(heads))
    assert alibi_slopes(heads)[:power] == pytest.approx([2 ** (-8 * (k + 1) / power) for k in range(power)])


@pytest.mark.parametrize(("buckets", "longest"), [(32, 128), (8, 20), (16, 64), (32, 1000), (6, 100)])
def test_buckets_are_t5s(buckets, longest):
    distance = torch.arange(0, 2 * longest)
    theirs = T5Attention._relative_position_bucket(-distance, False, buckets, longest)
    assert torch.equal(relative_buckets(distance, buckets, longest), theirs)
