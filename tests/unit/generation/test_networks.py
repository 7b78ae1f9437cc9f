"""Every network gives one row of logits for a prompt, with a cache and without, in a batch with others."""

from __future__ import annotations

import pytest
import torch

from tests.plans import CACHED_NETWORKS, NETWORKS, SMALL
from tests.unit.generation.random_model import logits, runner

LENGTHS = (3, 6, 5)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_cache_and_padding_change_nothing(name: str) -> None:
    keys = {**SMALL, "init_method_std": 0.2, **NETWORKS[name]}
    whole, cached = (runner(parallel_residual=False, **keys) for _ in range(2))
    whole.recompute = True
    assert cached.recompute == (name not in CACHED_NETWORKS)
    expected = logits(whole, LENGTHS, steps=4)
    torch.testing.assert_close(logits(cached, LENGTHS, steps=4), expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(logits(cached, LENGTHS, steps=4).argmax(-1), expected.argmax(-1))
