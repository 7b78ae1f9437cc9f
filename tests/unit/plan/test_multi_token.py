"""Rules of multi-token prediction, the stage that holds it, and what the plan says of it."""

from __future__ import annotations

from typing import Any

import pytest

from neox.plan.report.text import format_plan
from neox.plan.rules import notes_without_effect
from neox.plan.search.candidates import layouts
from tests.plans import SIZES, plan_of, problem_keys

KEY = {"mtp_num_layers": 2}


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"mtp_num_layers": 32}, ("mtp_num_layers", "seq_length")),
        ({"pos_emb": "rpe"}, ("mtp_num_layers", "pos_emb")),
        ({"pipe_parallel_size": 2, "pos_emb": "learned"}, ("mtp_num_layers", "pipe_parallel_size", "pos_emb")),
        (
            {"pipe_parallel_size": 2, "embed_layernorm": True},
            ("mtp_num_layers", "pipe_parallel_size", "embed_layernorm"),
        ),
        ({"pipe_parallel_size": 2, "pipeline_schedule": "interleaved"}, ("mtp_num_layers", "pipeline_schedule")),
        ({"train_only_added_tokens": True, "added_tokens": ["<a>"]}, ("mtp_num_layers", "train_only_added_tokens")),
    ],
    ids=lambda value: " ".join(value),
)
def test_what_does_not_work_is_refused_by_name(keys: dict[str, Any], named: tuple[str, ...]) -> None:
    found = problem_keys(2, **{**SIZES, **KEY, **keys})
    assert any(keys[: len(named)] == named for keys in found), found


def test_a_weight_without_modules_has_no_effect() -> None:
    config = plan_of(**SIZES, mtp_loss_scaling_factor=0.3).config
    assert ("mtp_loss_scaling_factor",) in [note.keys for note in notes_without_effect(config)]


@pytest.mark.parametrize("method", ["uniform", "parameters", "type:transformer|mlp"])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_the_modules_stand_with_the_head_on_the_last_stage(method: str, stages: int) -> None:
    keys = {**SIZES, "num_layers": 6, "pipe_parallel_size": stages, "pipe_partition_method": method}
    plan = plan_of(stages, **keys, mtp_num_layers=3)
    last = plan.stages[-1]
    assert last.holds(plan.layers.head.index)
    assert all(last.holds(layer.index) for layer in plan.layers.multi_token)
    words = plan.layers.word_embeddings.numel
    copies = sum(spec.name == "word_embeddings.weight" for spec in last.parameter_specs(plan.layers))
    assert copies == 1
    without = plan_of(stages, **keys)
    assert last.parameters > words
    assert plan.layers.numel - without.layers.numel == sum(layer.numel for layer in plan.layers.multi_token)


def test_the_plan_says_that_they_are_for_training_only() -> None:
    plan = plan_of(**SIZES, **KEY)
    elements = sum(layer.numel for layer in plan.layers.multi_token)
    assert f"2 modules of multi-token prediction, {elements:,}" in format_plan(plan, training=False)


def test_the_search_keeps_to_the_plain_schedule() -> None:
    plan = plan_of(8, **{**SIZES, "num_layers": 16, "train_batch_size": 64}, **KEY)
    assert {layout.pipeline_schedule for layout in layouts(plan)} == {"1f1b"}
    assert any(layout.pp_size > 1 for layout in layouts(plan))
