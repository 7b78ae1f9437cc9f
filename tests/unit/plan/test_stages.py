"""Stages are cut as the installed DeepSpeed cuts them."""

from __future__ import annotations

import random
import re
from typing import get_args

import pytest
from deepspeed.runtime import utils as deepspeed_utils
from deepspeed.runtime.pipe.schedule import BackwardPass, DualPipeVSchedule, ForwardPass
from hypothesis import given, settings
from hypothesis import strategies as st

from neox.config.sections.runner import PipelineScheduleName
from neox.plan.ranks.partition import (
    LAYER_CLASS_NAMES,
    partition_balanced,
    partition_layers,
    partition_problem,
    partition_uniform,
)
from neox.plan.ranks.pipeline_schedules import PIPELINE_SCHEDULES, Pass
from neox.plan.ranks.stages import Division, plan_stages
from tests.plans import SIZES, plan_of, small_plan


def test_uniform_as_deepspeed():
    for items in range(1, 40):
        for parts in range(1, 12):
            assert partition_uniform(items, parts) == deepspeed_utils.partition_uniform(items, parts)


def test_balanced_as_deepspeed():
    rng = random.Random(0)
    cases = [[rng.choice((0, 1)) for _ in range(rng.randint(2, 24))] for _ in range(40)]
    cases += [[rng.randint(0, 10**9) for _ in range(rng.randint(2, 20))] for _ in range(30)]
    cases += [[0, 0, *[1] * layers, 0, 0, 0] for layers in (1, 2, 3, 8, 24, 44)]
    for weights in cases:
        for parts in range(1, 9):
            expected = [int(bound) for bound in deepspeed_utils.partition_balanced(weights, parts)]
            assert partition_balanced(weights, parts) == expected, (weights, parts)


def plan(**changes):
    sizes = {"num_layers": 6, "padded_vocab_size": 512}
    kinds = {"gpt_j_residual": True, "no_weight_tying": True, "output_layer_parallelism": "column"}
    return plan_of(**{**SIZES, **sizes, **kinds, **changes}).layers


def test_only_blocks_match_the_default_method():
    names = {
        kind: name for kind, name in LAYER_CLASS_NAMES.items() if re.search("transformer|mlp", name, re.IGNORECASE)
    }
    assert names == {"block": "TransformerLayer"}
    # 11 layers: embedding, identity, six blocks, identity, norm, head.
    assert partition_layers(plan(), 2, "type:transformer|mlp") == [0, 5, 11]
    assert partition_layers(plan(), 3, "type:transformer|mlp")[1:3] == [4, 6]


def test_parameters_weigh_what_one_rank_holds():
    layers = plan(padded_vocab_size=50432)
    weights = [sum(p.numel // 2 if p.partition_dim is not None else p.numel for p in x.parameters) for x in layers]
    expected = [int(b) for b in deepspeed_utils.partition_balanced(weights, 2)]
    assert partition_layers(layers, 2, "parameters", tp_size=2) == expected


def test_a_tied_head_weighs_its_copy():
    tied = plan(no_weight_tying=False, padded_vocab_size=50432)
    untied = plan(padded_vocab_size=50432)
    assert partition_layers(tied, 2, "parameters") == partition_layers(untied, 2, "parameters")


@pytest.mark.parametrize("method", ["uniform", "parameters", "type:transformer|mlp", "TYPE:Transformer", "type:.*"])
def test_good_methods(method):
    assert partition_problem(method) is None
    bounds = partition_layers(plan(), 2, method)
    assert bounds[0] == 0
    assert bounds[-1] == 11


@pytest.mark.parametrize("method", ["", "best", "uniform:2", "type:(", "type:conv", "profile"])
def test_bad_methods(method):
    assert partition_problem(method)


def test_interleaved_stages_hold_ranges_from_all_over_the_network():
    layers = plan(no_weight_tying=False)
    first, last = plan_stages(layers, 2, Division("uniform", "interleaved"), tp_size=1)
    assert (first.layers, last.layers) == ((0, 1, 2, 6, 7, 8), (3, 4, 5, 9, 10))
    assert [len(stage.ranges) for stage in (first, last)] == [2, 2]
    assert first.holds(7)
    assert not last.holds(7)
    assert [entry.index for entry in last.entries(layers)] == [3, 4, 5, 9, 10]
    copy_of_words = layers[0].numel
    assert first.parameters + last.parameters == layers.numel + copy_of_words


def test_the_first_stage_of_dualpipev_holds_both_ends_and_no_copy():
    layers = plan(no_weight_tying=False)
    first, last = plan_stages(layers, 2, Division("uniform", "dualpipev"), tp_size=1)
    assert (first.layers, last.layers) == ((0, 1, 2, 9, 10), (3, 4, 5, 6, 7, 8))
    assert first.parameters + last.parameters == layers.numel


@given(
    st.sampled_from(sorted(PIPELINE_SCHEDULES)),
    st.integers(1, 6),
    st.integers(2, 4),
    st.integers(1, 40),
    st.sampled_from(["uniform", "parameters", "type:transformer|mlp"]),
)
@settings(max_examples=60)
def test_each_layer_is_held_exactly_once(schedule, stages, virtual_stages, num_layers, method):
    layers = plan(num_layers=num_layers)
    division = Division(method, schedule, virtual_stages)
    held = [layer for stage in plan_stages(layers, stages, division, tp_size=1) for layer in stage.layers]
    assert sorted(held) == list(range(len(layers)))


def test_every_schedule_has_a_name_in_the_configuration():
    assert set(PIPELINE_SCHEDULES) == set(get_args(PipelineScheduleName))


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("more", [0, 1, 5])
def test_dualpipev_has_the_order_of_the_installed_deepspeed(stages, more):
    micro_batches = 2 * stages + more
    for stage in range(stages):
        found = []
        for commands in DualPipeVSchedule(micro_batches=micro_batches, stages=stages, stage_id=stage):
            for command in commands:
                if isinstance(command, ForwardPass | BackwardPass):
                    number = command.kwargs["buffer_id"] % micro_batches
                    found.append(Pass(isinstance(command, BackwardPass), command.kwargs["phase"], number))
        assert PIPELINE_SCHEDULES["dualpipev"].order(stage, stages, 2, micro_batches) == found


def test_stages_keep_the_activations_of_passes_in_between():
    one, interleaved, dual = (PIPELINE_SCHEDULES[name] for name in ("1f1b", "interleaved", "dualpipev"))
    assert [one.most_kept(stage, 4, 1, 8) for stage in range(4)] == [(4,), (3,), (2,), (1,)]
    assert one.most_kept(0, 4, 1, 3) == (3,)
    assert one.most_kept(0, 1, 1, 8) == (1,)
    assert [sum(interleaved.most_kept(stage, 4, 2, 8)) for stage in range(4)] == [11, 9, 7, 5]
    assert [sum(dual.most_kept(stage, 4, 2, 8)) for stage in range(4)] == [9, 9, 9, 9]


@pytest.mark.parametrize("schedule", sorted(PIPELINE_SCHEDULES))
def test_a_single_stage_needs_no_schedule(schedule):
    plan = small_plan(1, pipeline_schedule=schedule, pipe_parallel_size=1, train_batch_size=8)
    assert plan.memory == small_plan(1, train_batch_size=8).memory
