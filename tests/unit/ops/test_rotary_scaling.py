"""Scaled rotary frequencies are those of `transformers`."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from neox.architecture import ROPE_SCALINGS, rope_scaling_of, rope_scaling_problem
from neox.ops import rotary_factor, rotary_inv_freq, rotary_tables
from tests.transformers_versions import needs_rope_parameters

numbers = st.floats(1.0, 64.0).map(lambda x: round(x, 2))
lengths = st.sampled_from([512, 2048, 8192, 40960])
SCALINGS = st.one_of(
    st.fixed_dictionaries({"rope_type": st.just("linear"), "factor": numbers}),
    st.fixed_dictionaries(
        {
            "rope_type": st.just("llama3"),
            "factor": numbers,
            "low_freq_factor": st.just(1.0),
            "high_freq_factor": st.floats(1.5, 8.0).map(lambda x: round(x, 1)),
            "original_max_position_embeddings": lengths,
        }
    ),
    st.fixed_dictionaries(
        {"rope_type": st.just("yarn"), "factor": numbers, "original_max_position_embeddings": lengths},
        optional={
            "attention_factor": numbers,
            "beta_fast": st.sampled_from([16, 32, 40.0]),
            "beta_slow": st.sampled_from([1, 2.0]),
            "mscale": st.just(0.7),
            "mscale_all_dim": st.just(1.0),
            "truncate": st.booleans(),
        },
    ),
)
LONGROPE = {
    "rope_type": "longrope",
    "factor": 32.0,
    "short_factor": [1.0, 1.1, 1.5, 2.0],
    "long_factor": [1.0, 4.0, 30.0, 60.0],
    "original_max_position_embeddings": 4096,
}


@needs_rope_parameters
@settings(max_examples=60)
@given(SCALINGS, st.sampled_from([16, 64, 80, 128]), st.sampled_from([10000.0, 500000.0, 1e6]))
def test_frequencies_are_those_of_transformers(scaling, head_dim, base):
    assert rope_scaling_problem(scaling) is None
    config = LlamaConfig(
        hidden_size=2 * head_dim, num_attention_heads=2, rope_parameters={**scaling, "rope_theta": base}
    )
    theirs, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"))
    ours = dict(rope_scaling_of(scaling))
    torch.testing.assert_close(rotary_inv_freq(head_dim, base, None, ours), theirs, rtol=1e-6, atol=0)
    assert rotary_factor(ours) == pytest.approx(factor, rel=1e-12)
    cos, _ = rotary_tables(theirs, torch.tensor([0]), torch.float32, factor)
    assert cos[0, 0, 0].item() == pytest.approx(factor)


def _config(scaling: dict, head_dim: int, longest: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        max_position_embeddings=longest,
        rope_parameters={**scaling, "rope_theta": 10000.0},
    )


@needs_rope_parameters
@settings(max_examples=40)
@given(
    st.sampled_from([8, 64, 96]),
    st.floats(1.0, 16.0).map(lambda x: round(x, 2)),
    st.sampled_from([512, 4096]),
    st.integers(1, 40_000),
    st.integers(0, 2**31),
)
def test_frequencies_by_length_are_those_of_transformers(head_dim, factor, trained, length, seed):
    draw = torch.Generator().manual_seed(seed)
    longrope = {
        "rope_type": "longrope",
        "short_factor": (1 + torch.rand(head_dim // 2, generator=draw)).tolist(),
        "long_factor": (1 + 60 * torch.rand(head_dim // 2, generator=draw)).tolist(),
        "original_max_position_embeddings": trained,
    }
    dynamic = {"rope_type": "dynamic", "factor": factor}
    cases = {
        "longrope": (_config(longrope, head_dim, 8 * trained), {**longrope, "factor": 8.0}),
        "dynamic": (_config(dynamic, head_dim, trained), {**dynamic, "original_max_position_embeddings": trained}),
    }
    for kind, (config, settings_of_kind) in cases.items():
        assert rope_scaling_problem(settings_of_kind, head_dim) is None
        ours = dict(rope_scaling_of(settings_of_kind))
        # in a forward pass transformers gives the length as a tensor
        theirs, attention_factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=torch.tensor(length))
        found = rotary_inv_freq(head_dim, 10000.0, None, ours, torch.tensor([length, 1]))
        torch.testing.assert_close(found[0], theirs, rtol=1e-6, atol=0)
        shortest, _ = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=torch.tensor(1))
        torch.testing.assert_close(found[1], shortest, rtol=1e-6, atol=0)
        torch.testing.assert_close(rotary_inv_freq(head_dim, 10000.0, None, ours), shortest, rtol=1e-6, atol=0)
        assert rotary_factor(ours) == pytest.approx(attention_factor, rel=1e-12)


def test_no_scaling_has_one_form():
    assert rope_scaling_of(None) == rope_scaling_of({}) == rope_scaling_of({"rope_type": "default"}) == ()
    assert rope_scaling_of({"type": "linear", "factor": 2}) == (("factor", 2), ("rope_type", "linear"))


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        ({"rope_type": "dynamic", "factor": 2}, ("dynamic", "lacks original_max_position_embeddings")),
        ({**LONGROPE, "long_factor": [1.0, 2.0]}, ("2 numbers in long_factor", "4")),
        ({**LONGROPE, "short_factor": [1.0, 2.0, 3.0, 0]}, ("short_factor", "above 0")),
        ({**LONGROPE, "short_factor": 2.0}, ("short_factor", "list")),
        ({**LONGROPE, "factor": 0.5}, ("factor", "at least 1")),
        ({"rope_type": "other"}, ("'other'", "yarn")),
        ({"rope_type": "llama3", "factor": 8.0}, ("lacks low_freq_factor",)),
        ({"rope_type": "linear", "factor": 2, "beta_fast": 32}, ("no setting beta_fast",)),
        ({"type": "linear", "factor": "2"}, ("factor: '2'", "number")),
        ({"type": "linear", "factor": True}, ("factor: True", "number")),
        ({"type": "linear", "factor": 0}, ("above 0",)),
        ({"rope_type": "default", "factor": 2.0}, ("no setting factor",)),
    ],
)
def test_what_is_wrong_is_named(scaling, words):
    problem = rope_scaling_problem(scaling, 8)
    assert problem is not None
    assert all(word in problem for word in words), problem


def test_every_type_is_computed():
    for kind, scaling in ROPE_SCALINGS.items():
        given = {"rope_type": kind, **{name: 2.0 * n for n, name in enumerate(scaling.required, 1)}}
        if kind == "longrope":
            given = LONGROPE
        assert rotary_inv_freq(8, 10000.0, None, given).shape == (4,)
