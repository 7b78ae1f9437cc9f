"""Families: configurations both ways, names, and what they cannot express."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neox.architecture import BLOCKS, Architecture, build_layer_plan
from neox.errors import ConversionError
from neox.families import FAMILIES, ModelSettings
from neox.families.shared_entries import GATED_ACTIVATIONS, PLAIN_ACTIVATIONS
from tests.transformers_versions import IS_4, IS_5_0

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
SETTINGS = ModelSettings("bf16", 0.01, 0.1, 0.2, 1000, 7, 6)
NEOX = FAMILIES["gpt_neox"]


def comes_back(family, architecture):
    assert family.inexpressible_fields(architecture) == {}
    hf = family.config_json(architecture, SETTINGS)
    assert hf["model_type"] == family.model_type
    assert hf["architectures"] == [family.class_name]
    read, settings = family.read_config(hf)
    assert read == architecture
    assert replace(settings, hidden_dropout=SETTINGS.hidden_dropout) == SETTINGS


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"activation": "gelu_tanh", "tie_word_embeddings": True, "residual": "sequential"},
        {"mlp_width": 100, "rotary_base": 0.5, "activation": "relu"},
        {"qkv_bias": False, "attention_output_bias": False},
        {"rope_scaling": (("factor", 2.0), ("rope_type", "linear"))},
        *({"rotary_ndims": ndims} for ndims in range(2, 49, 2)),
    ],
    ids=str,
)
def test_a_configuration_of_gpt_neox_comes_back(changes):
    comes_back(NEOX, replace(ARCHITECTURE, **changes))


RECURRENT = {"mamba", "mamba2", "bamba"}
"""Families whose blocks this file's network does not have."""


def network_of(family):
    """A small network that a family has read."""
    config = family.config_json(ARCHITECTURE, SETTINGS)
    if family.model_type in RECURRENT:
        names = {"model_type": family.model_type, "architectures": [family.class_name]}
        config = {**names, "num_hidden_layers": 2, "vocab_size": 1000, "tie_word_embeddings": False}
    return family.read_config(config)[0]


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_every_parameter_has_names_of_its_own(family):
    architecture = network_of(family)
    layers = build_layer_plan(architecture, 1000)
    mappings = list(family.mappings(layers))
    parameters = [(layer.index, p.name) for layer in layers.weight_layers for p in layer.parameters]
    assert [(mapping.layer, mapping.name) for mapping in mappings] == parameters
    keys = [key for mapping in mappings for key in mapping.keys]
    assert len(set(keys)) == len(keys)
    assert bool(family.head_keys() & set(keys)) != family.is_encoder  # whose head is always tied


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_a_network_of_any_longest_sequence_has_its_form(family):
    """Also in families whose `config.json` does not say how long one may be."""
    assert family.inexpressible_fields(replace(network_of(family), max_positions=1536)) == {}


def test_fields_that_a_family_cannot_express_are_named():
    other = replace(ARCHITECTURE, positions="none", norm="other", activation="other", attention=(*BLOCKS, "other"))
    assert list(NEOX.inexpressible_fields(other)) == ["activation", "norm", "positions", "attention"]
    assert NEOX.inexpressible_fields(other)["attention"] == "its attention is global"
    assert list(NEOX.inexpressible_fields(replace(ARCHITECTURE, attention_output_bias=False, window=4))) == [
        "attention_output_bias",
        "window",
    ]


def test_activations_have_one_name_here_and_every_name_of_transformers_is_read():
    from transformers.activations import ACT2FN

    names = [*PLAIN_ACTIVATIONS.values(), *GATED_ACTIVATIONS.values(), "gelu_fast", "gelu_pytorch_tanh"]
    assert set(names) <= set(ACT2FN)
    for name in ("gelu_new", "gelu_fast", "gelu_pytorch_tanh"):
        assert NEOX.read_config({"hidden_act": name})[0].activation == "gelu_tanh"
    assert NEOX.read_config({"hidden_act": "swish"})[0].activation == "swish"


def test_rotary_positions_of_both_forms_are_read():
    scaling = {"rope_type": "linear", "factor": 4.0}
    old = NEOX.read_config(
        {"rotary_emb_base": 500, "rotary_pct": 0.5, "rope_scaling": {"type": "linear", "factor": 4.0}}
    )
    new = NEOX.read_config({"rope_parameters": {**scaling, "rope_theta": 500.0, "partial_rotary_factor": 0.5}})
    assert old == new
    assert new[0].rope_scaling == (("factor", 4.0), ("rope_type", "linear"))
    assert (new[0].rotary_base, new[0].rotary_ndims) == (500.0, 48)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_missing_entries_have_the_defaults_of_transformers(family):
    """Those of transformers 5: 4 had other rotary frequencies for two families, whose files always name them."""
    from transformers import CONFIG_MAPPING, AutoConfig

    if family.model_type not in CONFIG_MAPPING:
        pytest.skip("this version of transformers does not know the family")
    if IS_4 and family.model_type in ("cohere", "olmo3"):
        pytest.skip("another default in transformers 4")
    if IS_5_0 and family.model_type == "olmo3":
        pytest.skip(
            "transformers 5.0 has one dictionary of rotary frequencies, later versions one for each kind of block"
        )

    without_default = {"num_experts_per_tok": 6} if family.model_type == "deepseek_v2" else {}
    full = AutoConfig.for_model(family.model_type, **without_default).to_dict()
    needed = (
        *without_default,
        "vocab_size",
        "hidden_size",
        "num_attention_heads",
        "num_hidden_layers",
        "intermediate_size",
    )
    given = {key: full[key] for key in needed if key in full and family.model_type not in ("gpt2", "gptj")}
    assert family.read_config(given)[0] == family.read_config(full)[0]


LLAMAS = ["llama", "mistral", "qwen2", "qwen3", "olmo2"]


def keys_refused(family, hf):
    """The keys that the refusal of a `config.json` names, in its order."""
    with pytest.raises(ConversionError) as refused:
        FAMILIES[family].read_config(hf)
    _, *reasons = str(refused.value).splitlines()
    return [reason.split()[0].rstrip(":") for reason in reasons]


@pytest.mark.parametrize("family", LLAMAS)
def test_entries_that_a_family_needs_are_named_together(family):
    missing = ["hidden_size", "intermediate_size"]
    assert keys_refused(family, {"vocab_size": 10, "num_attention_heads": 2, "num_hidden_layers": 1}) == missing


SMALL = {
    "vocab_size": 90,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 72,
}


@pytest.mark.parametrize(
    ("family", "entry"),
    [
        ("gpt_neox", {"hidden_act": "tanh"}),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
        ("gptj", {"rotary_dim": None}),
        ("llama", {"num_attention_heads": 0}),
        ("llama", {"hidden_size": 33}),
        ("gpt2", {"n_layer": 1.5}),
        ("llama", {"vocab_size": True}),
        ("llama", {"max_position_embeddings": None}),
        ("llama", {"attention_dropout": "x"}),
        ("llama", {"tie_word_embeddings": 1}),
        ("gpt_neox", {"use_parallel_residual": 1}),
        ("llama", {"hidden_act": ["silu"]}),
        ("llama", {"rope_parameters": True}),
        ("llama", {"rope_theta": "x"}),
        ("llama", {"eos_token_id": "x"}),
        ("mistral", {"sliding_window": 0}),
        ("qwen2", {"layer_types": ["full_attention"]}),
        ("qwen3", {"layer_types": ["full_attention", "chunked_attention"]}),
        ("bert", {"is_decoder": True}),
        ("gpt_oss", {"quantization_config": {"quant_method": "awq"}}),
        ("gpt_oss", {"swiglu_limit": 5.0}),
        ("mamba2", {"time_step_limit": 0.1}),
    ],
    ids=str,
)
def test_entries_of_config_json_that_cannot_be_read_are_named(family, entry):
    small = {key: value for key, value in SMALL.items() if key not in FAMILIES[family].other_names}
    assert keys_refused(family, {**small, **entry}) == [*entry]


@pytest.mark.parametrize("value", [True, 1, {}, None, "LlamaForCausalLM"], ids=str)
def test_an_entry_of_architectures_that_is_no_list_says_nothing(value):
    network, _ = FAMILIES["llama"].read_config({**SMALL, "architectures": value})
    assert network == FAMILIES["llama"].read_config(SMALL)[0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes"])
def test_quantised_weights_are_refused_by_name(family, method):
    assert "quantization_config" in keys_refused(family, {**SMALL, "quantization_config": {"quant_method": method}})


def test_heads_that_are_too_many_are_refused():
    with pytest.raises(ConversionError):
        NEOX.read_config({"hidden_size": 3, "num_attention_heads": 4})


VALUES = st.sampled_from([None, True, False, 0, 1, 2, -3, 1e9, 0.5, "", "gelu", [], [1], {}, {"rope_type": "x"}])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_broken_config_json_is_refused_or_read(family):
    known = [*FAMILIES[family].config_json(ARCHITECTURE, SETTINGS)]

    @given(st.dictionaries(st.sampled_from(known), VALUES, max_size=4), st.sets(st.sampled_from(known), max_size=3))
    @settings(max_examples=70)
    def check(changed, removed):
        hf = {key: value for key, value in {**SMALL, **changed}.items() if key not in removed}
        try:
            architecture, _ = FAMILIES[family].read_config(hf)
        except ConversionError:
            return
        assert FAMILIES[family].inexpressible_fields(architecture) == {}

    check()


def test_what_a_family_writes_can_be_read():
    for family in FAMILIES.values():
        assert family.inexpressible_fields(network_of(family)) == {}


def test_families_that_most_programs_read_come_first():
    first = ["gpt_neox", "gpt2", "gptj", "llama", "mistral", "qwen2", "qwen3", "olmo2"]
    assert list(FAMILIES)[:8] == first
    assert list(FAMILIES)[8:] == sorted(list(FAMILIES)[8:])
