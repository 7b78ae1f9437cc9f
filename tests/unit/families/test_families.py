"""Families: configurations both ways, names, and what they cannot express."""

from dataclasses import replace

import pytest

from neox.architecture import ATTENTION, Architecture, build_layer_plan
from neox.errors import ConversionError
from neox.families import FAMILIES, ModelSettings

ARCHITECTURE = Architecture(
    num_layers=2,
    hidden_size=96,
    num_attention_heads=2,
    num_kv_heads=2,
    head_dim=48,
    mlp_width=384,
    activation="gelu",
    norm="layernorm",
    norm_epsilon=1e-6,
    positions="rotary",
    rotary_ndims=14,
    rotary_base=5000.0,
    max_positions=128,
    attention=("global",) * 2,
    residual="parallel",
    tie_word_embeddings=False,
)
SETTINGS = ModelSettings("bf16", 0.01, 0.1, 0.2, 1000, 7)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"activation": "gelu_tanh", "tie_word_embeddings": True, "residual": "sequential"},
        {"mlp_width": 100, "rotary_base": 0.5},
        *({"rotary_ndims": ndims} for ndims in range(2, 49, 2)),
    ],
    ids=str,
)
def test_a_configuration_comes_back(family, changes):
    architecture = replace(ARCHITECTURE, **changes)
    assert family.problems(architecture) == {}
    hf = family.write_config(architecture, SETTINGS)
    assert hf["model_type"] == family.model_type
    assert hf["architectures"] == [family.class_name]
    assert family.read_config(hf) == (architecture, SETTINGS)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_every_parameter_has_names_of_its_own(family):
    layers = build_layer_plan(ARCHITECTURE, 1000)
    mappings = list(family.mappings(layers))
    parameters = [(layer.index, p.name) for layer in layers.weight_layers for p in layer.parameters]
    assert [(mapping.layer, mapping.name) for mapping in mappings] == parameters
    keys = [key for mapping in mappings for key in mapping.keys]
    assert len(set(keys)) == len(keys)
    assert family.head_keys() & set(keys)


def test_fields_that_gpt_neox_cannot_express_are_named():
    other = replace(ARCHITECTURE, positions="none", norm="other", activation="other", attention=(*ATTENTION, "other"))
    assert list(FAMILIES["gpt_neox"].problems(other)) == ["positions", "norm", "activation", "attention"]


def test_values_of_config_json_that_are_not_supported_are_named_together():
    hf = {"hidden_act": "relu", "attention_bias": False, "rope_scaling": {"type": "linear"}}
    with pytest.raises(ConversionError, match=r"(?s)hidden_act: relu.*attention_bias.*rope type linear"):
        FAMILIES["gpt_neox"].read_config(hf)
