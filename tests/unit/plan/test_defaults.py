"""Defaults that matter for the result, and the width that gpt-neox calls `intermediate_size`."""

from __future__ import annotations

import pytest

from neox.architecture import NORMS
from neox.architecture.choices import TRANSFORMER_ENGINE_NORMS
from neox.plan import format_plan
from neox.plan.report.defaults import notable_defaults
from tests.plans import SIZES, plan_of


def keys_of(plan, *, training=True):
    return {text.split(" ")[0] for text in notable_defaults(plan, training=training)}


def test_what_nobody_gave_is_shown():
    plan = plan_of(**SIZES, norm="rmsnorm")
    found = keys_of(plan)
    assert {"hidden_dropout", "attention_dropout", "rms_norm_epsilon", "attention_config"} <= found
    assert not found & {"norm", "layernorm_epsilon", "pos_emb"}
    assert "hidden_dropout" not in keys_of(plan, training=False)
    assert "precision" in keys_of(plan_of(**{key: value for key, value in SIZES.items() if key != "precision"}))
    assert "rms_norm_epsilon 1e-08" in format_plan(plan)


def test_what_is_given_is_not_repeated():
    keys = {"hidden_dropout": 0.1, "attention_dropout": 0, "layernorm_epsilon": 1e-5}
    flash = {"attention_config": [[["flash"], "all"]], "precision": "bf16"}
    found = keys_of(plan_of(**SIZES, **keys, **flash))
    assert not found & {*keys, "attention_config", "precision"}


@pytest.mark.parametrize("name", [*NORMS, "te_rmsnorm"])
def test_the_epsilon_of_every_norm_is_shown(name):
    used = NORMS[TRANSFORMER_ENGINE_NORMS.get(name, name)].epsilon_key
    keys = keys_of(plan_of(**SIZES, norm=name))
    assert {key for key in keys if key.endswith("epsilon")} == {used} - {None}


def test_verbose_lists_every_default():
    plan = plan_of(**SIZES)
    text = format_plan(plan, verbose=True)
    assert "rotary_emb_base 10000" in text
    assert "make_vocab_size_divisible_by 128" in text
    assert "rotary_emb_base" not in format_plan(plan)


@pytest.mark.parametrize(
    ("keys", "noted"),
    [
        ({"activation": "swiglu", "intermediate_size": 640}, True),
        ({"activation": "swiglu", "mlp_width": 640}, False),
        ({"activation": "swiglu"}, False),
        ({"activation": "gelu", "intermediate_size": 640}, False),
    ],
)
def test_a_gated_mlp_has_a_third_of_intermediate_size(keys, noted):
    plan = plan_of(**SIZES, **keys)
    notes = [note for note in plan.notes if "mlp_width" in note]
    assert bool(notes) is noted
    if noted:
        assert plan.architecture.mlp_width == 213
        assert "213" in notes[0]
