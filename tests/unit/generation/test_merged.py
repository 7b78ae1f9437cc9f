"""Merged blocks give the logits of the modules they were made from: prompts, single tokens, padding, no cache."""

from dataclasses import replace

import pytest
import torch

from neox.errors import NeoXError
from neox.generation.merged import MergedBlocks, can_merge
from neox.generation.packed import can_pack
from tests.unit.generation.random_model import CPU, logits, runner

pytestmark = pytest.mark.skipif(not can_pack(CPU, torch.float32), reason="this CPU has no packed fp32 weights")


def blocks_of(layers):
    return [layers[index] for index in sorted(layers) if hasattr(layers[index], "attention")]


def merge(model, layers):
    """Run the model with merged blocks from here on."""
    model.stage = replace(model.stage, blocks=MergedBlocks(blocks_of(layers), max_length=32))


@pytest.mark.parametrize(("rotary", "tanh"), [(True, False), (True, True), (False, True)])
@pytest.mark.parametrize("lengths", [[5], [5, 5], [3, 7, 5]])
def test_equal_logits(rotary, tanh, lengths):
    model, layers = runner(rotary=rotary, tanh=tanh)
    model.stage.blocks.step = None
    by_modules = logits(model, lengths, 4)
    merge(model, layers)
    merged = logits(model, lengths, 4)
    assert by_modules.std() > 0.5
    assert torch.allclose(merged, by_modules, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "keys",
    [
        {"rotary_pct": 1.0},
        {"rotary_pct": 0.125},
        {"num_attention_heads": 1},
        {"num_attention_heads": 12},
        {"apply_query_key_layer_scaling": True},
        {"no_weight_tying": False},
    ],
    ids=str,
)
def test_equal_logits_of_other_shapes(keys):
    model, layers = runner(**keys)
    model.stage.blocks.step = None
    by_modules = logits(model, [3, 7, 5], 4)
    merge(model, layers)
    assert torch.allclose(logits(model, [3, 7, 5], 4), by_modules, atol=2e-5, rtol=1e-5)


def test_equal_hidden_states_without_a_cache_and_in_pieces():
    model, layers = runner()
    tokens = torch.randint(0, 100, (2, 9), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        by_modules = model.hidden(tokens)
        merge(model, layers)
        assert torch.allclose(model.hidden(tokens), by_modules, atol=2e-5)
        cache = model.stage.blocks.new_cache(2, 9)
        pieces = [model.hidden(piece, cache) for piece in tokens.split([4, 3, 1, 1], dim=1)]
    assert torch.allclose(torch.cat(pieces, dim=1), by_modules, atol=2e-5)


def test_rows_are_dropped_and_doubled():
    model, layers = runner()
    rows = torch.tensor([2, 0, 2, 1])
    tokens = torch.randint(0, 100, (4, 1), generator=torch.Generator().manual_seed(4))

    def after_reordering():
        decoding = model.begin([3, 6, 5], 8)
        decoding.feed(torch.arange(18).view(3, 6))
        decoding.reorder(rows)
        return decoding.feed(tokens)

    with torch.inference_mode():
        by_modules = after_reordering()
        merge(model, layers)
        assert torch.allclose(after_reordering(), by_modules, atol=2e-5)


@pytest.mark.parametrize("recompute", [False, True])
def test_rows_at_the_end_of_the_context_do_not_disturb_others(recompute):
    """The first of 31 tokens has room for one more of 32; the other goes on."""
    model, layers = runner()
    model.recompute = recompute
    by_modules = logits(model, [31, 20], 5)
    merge(model, layers)
    assert torch.allclose(logits(model, [31, 20], 5)[:, 1], by_modules[:, 1], atol=2e-5, rtol=1e-5)


def test_a_stage_without_blocks():
    blocks, x = MergedBlocks((), max_length=32), torch.ones(2, 3, 48)
    cache = blocks.new_cache(2, 8)
    assert torch.equal(blocks(x, cache), x)
    assert cache.length == 3


def test_a_full_cache_refuses():
    model, layers = runner()
    merge(model, layers)
    cache = model.stage.blocks.new_cache(1, 4)
    with torch.inference_mode(), pytest.raises(NeoXError, match="room for 4 tokens"):
        model.hidden(torch.zeros(1, 5, dtype=torch.long), cache)


def test_what_cannot_be_merged():
    _, parallel = runner()
    _, sequential = runner(parallel_residual=False)
    assert can_merge(blocks_of(parallel), torch.float32)
    assert not can_merge(blocks_of(parallel), torch.bfloat16)
    assert not can_merge(blocks_of(sequential), torch.float32)
    blocks_of(parallel)[1].post_attention_layernorm.eps *= 2
    assert not can_merge(blocks_of(parallel), torch.float32)
