"""Sparse kinds of attention: what a query sees, and their settings."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from neox.architecture import ACTIVATIONS, SPARSITY, settings_of
from neox.config import NeoXConfig
from neox.errors import NeoXError
from neox.model import GPT, BlockContext
from neox.ops import VisiblePairs, block_layout, sparse_rule
from neox.parallel import ParallelGrid
from neox.plan.rules import notes_without_effect
from tests.errors import raises_naming
from tests.plans import SMALL, problem_keys, small_plan

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
    context = BlockContext(torch.arange(16), attention.position_tables(torch.arange(16), 16, x.dtype))
    tables = context.tables[attention.tables_key]
    q, k = attention.rotary_emb(torch.stack([q, k], 3), tables).unbind(3)
    settings = settings_of(kind, model.architecture.sparsity)
    layout = block_layout(kind, settings, blocks=8, heads=range(4), layer=0)
    rule = sparse_rule(layout, 2)
    seen = VisiblePairs(16, x.device, rule=rule, rule_heads=layout.shape[0]).dense()
    assert not torch.equal(seen.expand(1, 4, 16, 16), torch.ones(1, 4, 16, 16).tril().bool()), "hides nothing"
    scores = torch.einsum("bsnd,btnd->bnst", q, k) / 8**0.5
    expected = torch.einsum("bnst,btnd->bsnd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v).reshape(2, 16, 32)
    expected = torch.nn.functional.linear(expected, attention.dense.weight, attention.dense.bias)
    torch.testing.assert_close(attention(x, context), expected, atol=1e-6, rtol=1e-5)
    attention(
        x.repeat(1, 2, 1), BlockContext(torch.arange(32), attention.position_tables(torch.arange(32), 32, x.dtype))
    )
    torch.testing.assert_close(attention(x, context), expected, atol=1e-6, rtol=1e-5)  # a longer row changed nothing


def test_settings_are_checked_and_those_without_effect_are_named() -> None:
    keys = {**SMALL, "attention_config": ["sparse_fixed", "global"]}
    assert problem_keys(**keys, sparsity_config={"blok": 8}) == [("sparsity_config.blok", "sparsity_config.block")]
    (found,) = problem_keys(**keys, sparsity_config={"block": 5})
    assert found[:2] == ("seq_length", "sparsity_config.block")
    (found,) = problem_keys(**keys, sparsity_config={"num_global_blocks": 3})
    assert found[0] == "sparsity_config"
    given = NeoXConfig.from_flat({**keys, "sparsity_config": {"num_random_blocks": 3, "num_local_blocks": 2}})
    (note,) = notes_without_effect(given)
    assert note.keys == ("sparsity_config.num_random_blocks",)


def test_a_network_with_gates_generates_without_a_cache_and_within_its_length() -> None:
    model = GPT(small_plan(attention_config=["global", "gmlp"]), ParallelGrid.single()).eval()
    with raises_naming(NeoXError, "gmlp"):
        model.new_cache(batch=1, max_length=4)
    with raises_naming(NeoXError, "seq_length", 16, 17):
        model(torch.zeros(1, 17, dtype=torch.long))


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"max_position_embeddings": 32}, "max_position_embeddings"),
        ({"activation": "geglu"}, "activation"),
        ({"use_mup": True, "mup_base_hidden_size": 16}, "use_mup"),
    ],
)
def test_what_does_not_fit_gates_is_refused_by_name(keys: dict[str, Any], named: str) -> None:
    if keys.get("activation") not in (None, *ACTIVATIONS):
        pytest.skip("no gated activation")
    problems = problem_keys(**SMALL | {"attention_config": ["gmlp", "global"]} | keys)
    assert any(named in found for found in problems)


IGNORED_BY_GATES = {
    "norm_placement": "both",
    "gpt_j_residual": True,
    "pos_emb": "alibi",
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
    "mlp_width": 64,
    "intermediate_size": 64,
    "qk_norm": "head",
    "num_kv_heads": 2,
}


@pytest.mark.parametrize(("key", "value"), IGNORED_BY_GATES.items())
def test_networks_of_gates_alone_refuse_keys_that_only_other_blocks_use(key: str, value: Any) -> None:
    rotary = {"rotary_pct": 1.0} if key == "pos_emb" else {}
    for kind in ("gmlp", "amlp"):
        keys = SMALL | {"attention_config": [kind, kind], key: value, **rotary}
        assert (key, "attention_config") in problem_keys(**keys)
    mixed = SMALL | {"attention_config": ["gmlp", "global"], key: value, **rotary}
    assert problem_keys(**mixed) == []


def test_rotary_positions_that_no_block_applies_are_noted() -> None:
    noted = {}
    for kinds in (["gmlp", "amlp"], ["gmlp", "global"]):
        config = NeoXConfig.from_flat(SMALL | {"attention_config": kinds})
        noted[kinds[1]] = ("pos_emb", "attention_config") in [note.keys for note in notes_without_effect(config)]
    assert noted == {"amlp": True, "global": False}


def test_networks_of_gates_alone_take_keys_that_ask_for_nothing() -> None:
    keys = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "norm_placement": "input", "pos_emb": "learned"}
    assert problem_keys(**SMALL | {"attention_config": ["gmlp", "amlp"], **keys}) == []
