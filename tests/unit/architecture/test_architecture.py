"""The architecture: from keys, compared field by field, as JSON."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields

import pytest

from neox.architecture import Architecture, NetworkFields
from neox.config import NeoXConfig
from neox.plan import architecture_of, architecture_settings, saved_architecture, yaml_keys
from neox.plan.network.architecture_keys import FIELD_KEYS
from tests.plans import NETWORKS, SMALL


def of(**keys) -> Architecture:
    return architecture_of(NeoXConfig.from_flat({**SMALL, **keys}))


def test_fields_from_keys():
    network = of(bias_gelu_fusion=True, gpt_j_residual=True, attention_config=[[["flash"], "all"]])
    assert (network.activation, network.positions, network.rotary_ndims) == ("gelu_tanh", "rotary", 4)
    assert (network.mlp_width, network.head_dim, network.attention) == (128, 8, ("global", "global"))
    assert network.parallel_residual
    assert not network.tie_word_embeddings
    assert of(pos_emb="none").rotary_ndims == 0
    scaling = {"type": "linear", "factor": 2.0}
    assert of(rope_scaling=scaling).rope_scaling == (("factor", 2.0), ("rope_type", "linear"))
    assert of(pos_emb="none", rope_scaling=scaling).rope_scaling == ()


def test_kernels_precision_and_dropout_are_no_part_of_it():
    for keys in (
        {"attention_config": [[["flash"], 2]]},
        {"scaled_upper_triang_masked_softmax_fusion": True},
        {"precision": "bf16"},
        {"hidden_dropout": 0.1},
        {"make_vocab_size_divisible_by": 8},
        {"output_layer_parallelism": "row"},
    ):
        assert of(**keys) == of(), keys


def test_json_round_trip():
    assert Architecture.from_dict(json.loads(json.dumps(of().to_dict()))) == of()


def test_only_stored_fields_are_compared():
    saved = saved_architecture(architecture_settings(NeoXConfig.from_flat(SMALL)))
    assert {f.name for f in fields(Architecture) if f.default is MISSING} <= set(saved)
    assert of().differences(saved) == []
    assert of(max_position_embeddings=64).differences(saved) == []  # no parameter depends on it
    assert saved_architecture({"num_layers": 2, "rotary_pct": 1.0}) == {"num_layers": 2}
    assert [d.field for d in of(num_layers=3).differences({"num_layers": 2})] == ["num_layers"]


@pytest.mark.parametrize(
    ("keys", "field", "may"),
    [
        ({"pos_emb": "none"}, "positions", True),
        ({"rotary_emb_base": 500}, "rotary_base", True),
        ({"no_weight_tying": False}, "tie_word_embeddings", True),
        ({"bias_gelu_fusion": True}, "activation", False),
        ({"layernorm_epsilon": 1e-6}, "norm_epsilon", False),
    ],
)
def test_what_may_differ_in_finetuning(keys, field, may):
    saved = saved_architecture(architecture_settings(NeoXConfig.from_flat(SMALL)))
    own, other = NetworkFields.FIXED, NetworkFields.ADJUSTABLE
    if may:
        own, other = other, own
    assert field in [d.field for d in of(**keys).differences(saved, own)]
    assert field not in [d.field for d in of(**keys).differences(saved, other)]
    assert field in [d.field for d in of(**keys).differences(saved)]


def test_each_norm_has_its_epsilon():
    epsilons = {"layernorm_epsilon": 0.1, "rms_norm_epsilon": 0.2, "scalenorm_epsilon": 0.3}
    norms = {"layernorm": 0.1, "te_layernorm": 0.1, "non_parametric_layernorm": 0.1, "scalenorm": 0.3}
    for norm, epsilon in {**norms, "rmsnorm": 0.2, "te_rmsnorm": 0.2, "rmsnorm_v2.0": 0.2}.items():
        network = of(norm=norm, **epsilons)
        assert (network.norm, network.norm_epsilon) == (norm.removeprefix("te_"), epsilon)
        assert architecture_of(NeoXConfig.from_flat({**SMALL, **yaml_keys(network)})) == network


@pytest.mark.parametrize("network", sorted(NETWORKS.keys() - {"mup"}))
def test_keys_give_the_network_back(network):
    one = of(**NETWORKS[network])
    assert architecture_of(NeoXConfig.from_flat(yaml_keys(one))) == one
    assert one.differences(saved_architecture(architecture_settings(NeoXConfig.from_flat(yaml_keys(one))))) == []


def test_every_field_follows_from_keys():
    assert FIELD_KEYS.keys() == {field.name for field in fields(Architecture)}


def test_keys_that_an_older_checkpoint_lacks_had_their_defaults():
    saved = architecture_settings(NeoXConfig.from_flat(SMALL))
    for later in ("gpt_j_tied", "norm_placement", "sliding_window_width", "head_dim", "mlp_width"):
        del saved[later]
    assert of().differences(saved_architecture(saved)) == []
    names = [
        d.field for d in of(norm_placement="output", sliding_window_width=4).differences(saved_architecture(saved))
    ]
    assert set(names) == {"residual", "attention"}
