"""MLPs and norms in tiles of tokens give the losses, gradients and texts that they give at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from neox.data.masked.masked_batch import MaskedLMBatch
from neox.model import GPT, Context
from neox.parallel import ParallelGrid
from tests.losses import causal_lm_loss, masked_lm_loss
from tests.masked_batches import masked_samples
from tests.plans import ENCODERS, NETWORKS, SMALL, problem_keys, small_plan

CASES: dict[str, dict[str, Any]] = {
    "sequential": {},
    "parallel": NETWORKS["alibi"],
    "parallel with one norm": NETWORKS["sinks"],
    "norms around": NETWORKS["gemma"],
    "norms of outputs": {"norm_placement": "output", "norm": "rmsnorm_v2.0"},
    "norm by steps": NETWORKS["sinusoidal"],
    "recomputed": {"checkpoint_activations": True},
    "adapters": {"lora": {"r": 2, "target": ["dense_h_to_4h", "dense_4h_to_h"]}},
}
TOKENS = torch.randint(1, 90, (2, 16), generator=torch.Generator().manual_seed(0))


def build(size: int | None, keys: dict[str, Any]) -> GPT:
    return GPT(small_plan(mlp_tile_size=size, **keys), ParallelGrid.single())


def count_of_rows(model: GPT) -> list[int]:
    """Return a list that gets the number of tokens of each call of the first block's MLP."""
    rows: list[int] = []
    first = model.stage.blocks[0].mlp.dense_h_to_4h
    first.register_forward_pre_hook(lambda _, inputs: rows.append(inputs[0].shape[1]))
    return rows


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_all_tokens_at_once(name: str) -> None:
    models = [build(size, CASES[name]).train() for size in (None, 5)]
    rows = count_of_rows(models[1])
    losses = []
    for model in models:
        loss = causal_lm_loss(model, TOKENS, TOKENS.roll(-1, 1), torch.ones(TOKENS.shape))
        loss.backward()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert sorted(set(rows)) == [1, 5]
    wanted = dict(models[0].named_parameters())
    for parameter_name, parameter in models[1].named_parameters():
        of_whole = wanted[parameter_name].grad
        if of_whole is None:
            assert parameter.grad is None
            continue
        bound = 1e-6 * max(1.0, of_whole.abs().max().item())
        assert (parameter.grad - of_whole).abs().max() <= bound, parameter_name


def test_a_bidirectional_network_goes_by_tiles() -> None:
    losses = []
    for size in (None, 5):
        plan = small_plan(**ENCODERS["bert"], mlp_tile_size=size)
        model = GPT(plan, ParallelGrid.single()).train()
        loss = masked_lm_loss(model, MaskedLMBatch(**masked_samples(plan, 0)))
        loss.backward()
        losses.append((loss.item(), model.sequential[2].mlp.dense_h_to_4h.weight.grad.norm().item()))
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


@torch.no_grad()
def test_prompts_and_scores_are_the_same_and_nothing_is_kept() -> None:
    whole, tiled = (build(size, {}).eval() for size in (None, 5))
    torch.testing.assert_close(tiled(TOKENS), whole(TOKENS), atol=1e-6, rtol=1e-6)
    cache = tiled.new_cache(2, 16)
    steps = [tiled(TOKENS[:, :15], Context(cache=cache)), tiled(TOKENS[:, 15:], Context(cache=cache))]
    torch.testing.assert_close(torch.cat(steps, dim=1), whole(TOKENS), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("named", "keys"),
    [
        ("seq_length", {"mlp_tile_size": 16}),
        ("context_parallel_size", {"mlp_tile_size": 8, "context_parallel_size": 2}),
        ("moe_num_experts", {"moe_num_experts": 2}),
        ("attention_config", {"attention_config": ["gmlp", "global"]}),
        ("compile_layers", {"compile_layers": True}),
    ],
)
def test_tiles_that_cannot_be_are_refused(named: str, keys: dict[str, Any]) -> None:
    found = problem_keys(2, **{**SMALL, "mlp_tile_size": 4, **keys})
    assert any(named in of_one and "mlp_tile_size" in of_one for of_one in found)
