"""The whole model on one rank: loss, recomputation, generation cache."""

from __future__ import annotations

import pytest
import torch

from neox.errors import NeoXError
from neox.model import GPT, Context
from neox.parallel import ParallelGrid
from tests.errors import raises_naming
from tests.losses import causal_lm_loss
from tests.plans import CACHED_NETWORKS, NETWORKS, block_kinds_of, small_plan

TOKENS = torch.randint(0, 100, (2, 12), generator=torch.Generator().manual_seed(0))


every_network = pytest.mark.parametrize("keys", NETWORKS.values(), ids=NETWORKS)
every_cached_network = pytest.mark.parametrize("keys", CACHED_NETWORKS.values(), ids=CACHED_NETWORKS)


@every_network
@pytest.mark.parametrize("chunk", [1, 2])
def test_recomputation_gives_the_same_gradients_with_dropout_on(chunk: int, keys):
    assert_recomputed_alike({"checkpoint_num_layers": chunk}, keys)


def assert_recomputed_alike(recomputation, keys):
    grid = ParallelGrid.single()
    results = []
    for recompute in (False, True):
        how = {"checkpoint_activations": recompute, **(recomputation if recompute else {})}
        model = GPT(small_plan(**{"hidden_dropout": 0.2, "attention_dropout": 0.2, **keys, **how}), grid)
        grid.seed(3)
        loss = causal_lm_loss(model, TOKENS, TOKENS, torch.ones(TOKENS.shape))
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters() if p.requires_grad)])
    assert all(torch.equal(plain, recomputed) for plain, recomputed in zip(*results, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("part", ["full_attn", "selective"])
@every_network
def test_recomputation_of_attention_gives_the_same_gradients(part: str, keys):
    if any(kind.attention is None for kind in block_kinds_of(keys)):
        pytest.skip("some blocks have no attention to recompute: refused")
    assert_recomputed_alike({"recompute_granularity": part}, keys)
    assert_recomputed_alike({"recompute_granularity": part, "no_recompute_layers": [1]}, keys)


@pytest.mark.parametrize("part", ["full_attn", "core_attn"])
def test_recomputation_of_parts_of_a_block(part: str):
    assert_recomputed_alike({"recompute_granularity": part, "no_recompute_layers": [1]}, {})


def test_blocks_that_keep_their_activations():
    """Five blocks, recomputed two at a time but for the third: the chunks are 0-1 and 3-4."""
    keys = {"num_layers": 5, "no_recompute_layers": [2], "checkpoint_num_layers": 2}
    assert_recomputed_alike(keys, {"num_layers": 5})
    model = GPT(small_plan(checkpoint_activations=True, **keys), ParallelGrid.single())
    ran = []
    for number, block in enumerate(model.blocks):
        block.register_forward_pre_hook(lambda *_, number=number: ran.append(number))
    causal_lm_loss(model, TOKENS, TOKENS, torch.ones(TOKENS.shape)).backward()
    assert ran == [0, 1, 2, 3, 4, 3, 4, 0, 1]


@every_network
def test_later_tokens_do_not_change_earlier_logits(keys):
    model = GPT(small_plan(**keys), ParallelGrid.single()).eval()
    changed = TOKENS.clone()
    changed[:, 7] = 5
    torch.testing.assert_close(model(TOKENS)[:, :7], model(changed)[:, :7])
    assert not torch.allclose(model(TOKENS)[:, 7], model(changed)[:, 7])


@pytest.mark.parametrize("steps", [(12,), (5, 1, 1, 5), (1,) * 12])
@every_cached_network
@torch.no_grad()
def test_cache_gives_the_logits_of_the_whole_sequence(steps: tuple[int, ...], keys):
    model = GPT(small_plan(**keys), ParallelGrid.single()).eval()
    cache = model.new_cache(batch=2, max_length=12)
    logits = torch.cat([model(part, Context(cache)) for part in TOKENS.split(steps, dim=1)], dim=1)
    torch.testing.assert_close(logits, model(TOKENS), atol=1e-6, rtol=1e-5)


@every_cached_network
@torch.no_grad()
def test_left_padded_rows_give_the_logits_of_each_row_alone(keys):
    model = GPT(small_plan(**keys), ParallelGrid.single()).eval()
    short = TOKENS[1:, :8]
    padded = torch.stack([TOKENS[0, :11], torch.cat([torch.zeros(3, dtype=torch.long), short[0]])])
    cache = model.new_cache(batch=2, max_length=16)
    cache.reset(start=torch.tensor([0, 3]))
    logits = model(padded, Context(cache))
    assert logits.isfinite().all()
    following = torch.tensor([[7], [9]])
    logits = torch.cat([logits, model(following, Context(cache))], dim=1)
    for row, alone in enumerate([TOKENS[:1, :11], short]):
        expected = model(torch.cat([alone, following[row : row + 1]], dim=1))[0]
        torch.testing.assert_close(logits[row, -expected.shape[0] :], expected, atol=1e-6, rtol=1e-5)


def test_a_full_cache_is_an_error():
    model = GPT(small_plan(), ParallelGrid.single()).eval()
    cache = model.new_cache(batch=2, max_length=4)
    with raises_naming(NeoXError, 4, 12):
        model(TOKENS, Context(cache))


@pytest.mark.parametrize("steps", [(12,), (9, 1, 2), (2,) * 6, (1,) * 12])
@torch.no_grad()
def test_a_cache_keeps_the_window_only(steps: tuple[int, ...]) -> None:
    """Blocks with a window and blocks without, in one network."""
    keys = {"attention_config": ["sliding_window", "global"], "sliding_window_width": 3}
    model = GPT(small_plan(**keys), ParallelGrid.single()).eval()
    cache = model.new_cache(batch=2, max_length=12)
    assert [store.slots for store in cache.stores] == [3, 12]
    logits = torch.cat([model(part, Context(cache)) for part in TOKENS.split(steps, dim=1)], dim=1)
    torch.testing.assert_close(logits, model(TOKENS), atol=1e-6, rtol=1e-5)
    cache.reset()
    model(TOKENS[:, :5], Context(cache))
    cache.reorder(torch.tensor([1, 1, 0]))
    following = model(TOKENS[[1, 1, 0], 5:6], Context(cache))
    torch.testing.assert_close(following, model(TOKENS)[[1, 1, 0], 5:6], atol=1e-6, rtol=1e-5)
