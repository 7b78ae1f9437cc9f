"""Stages are cut as the installed DeepSpeed cuts them."""

from __future__ import annotations

import random
import re

import pytest
from deepspeed.runtime import utils as deepspeed_utils

from neox.plan.stages import (
    LAYER_CLASS_NAMES,
    partition_balanced,
    partition_layers,
    partition_problem,
    partition_uniform,
)
from tests.plans import SIZES, plan_of


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
    assert partition_layers(layers, 2, "parameters", mp=2) == expected


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
