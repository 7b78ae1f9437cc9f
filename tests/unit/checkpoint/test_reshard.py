"""Splitting a parameter over tensor ranks and merging it again are inverses, at any degrees."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from neox.architecture import ParameterSpec
from neox.checkpoint.weights.shards import merge
from neox.parallel import shard

DEGREES = st.sampled_from((1, 2, 3, 6))


@given(
    sections=st.lists(st.integers(1, 3).map(lambda n: 6 * n), min_size=1, max_size=4),
    rest=st.lists(st.integers(1, 3), max_size=2),
    dim=st.integers(0, 2),
    saved=DEGREES,
    wanted=DEGREES,
)
def test_any_degree_to_any_other(sections, rest, dim, saved, wanted):
    dim = min(dim, len(rest))
    shape = (*rest[:dim], sum(sections), *rest[dim:])
    spec = ParameterSpec("w", shape, dim, sections=tuple(sections) if len(sections) > 1 else ())
    full = torch.arange(spec.numel).reshape(shape)
    parts = [shard(full, spec, rank, saved) for rank in range(saved)]
    assert all(part.shape == spec.shard_shape(saved) for part in parts)
    assert torch.equal(merge(spec, parts), full)
    for rank in range(wanted):
        assert torch.equal(merge(spec, parts, spec.ranges(rank, wanted)), shard(full, spec, rank, wanted))


def test_a_rank_holds_its_share_of_each_section():
    spec = ParameterSpec("w", (8,), 0, sections=(4, 2, 2))
    assert shard(torch.arange(8), spec, 1, 2).tolist() == [2, 3, 5, 7]
    with pytest.raises(ValueError):
        shard(torch.arange(8), spec, 0, 4)
