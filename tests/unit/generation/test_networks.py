"""Every network gives one row of logits for a prompt, with a cache and without, in a batch with others."""

from __future__ import annotations

import pytest
import torch

from neox.generation.decoding import decode
from neox.generation.request import SamplingParams
from tests.plans import CACHED_NETWORKS, NETWORKS, SMALL
from tests.unit.generation.random_model import logits, runner
from tests.unit.generation.test_packed import NoText

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


@pytest.mark.parametrize(
    "name", [name if name in ("learned", "gmlp") else pytest.param(name, marks=pytest.mark.slow) for name in NETWORKS]
)
def test_a_row_at_the_end_of_the_context_does_not_disturb_others(name: str) -> None:
    """It is computed beside them, at positions that the network does not have."""
    model = runner(parallel_residual=False, **{**SMALL, "init_method_std": 0.2, **NETWORKS[name]})
    params = SamplingParams(max_new_tokens=6, min_new_tokens=6)
    prompts = [[7] * (model.max_length - 1), [1, 2, 3]]
    together = decode(model, prompts, params, NoText(), keep_logits=True)
    assert [len(row.tokens) for row in together] == [1, 6]
    for prompt, row in zip(prompts, together, strict=True):
        (alone,) = decode(model, [prompt], params, NoText(), keep_logits=True)
        torch.testing.assert_close(torch.stack(row.logits), torch.stack(alone.logits), atol=1e-4, rtol=1e-4)
