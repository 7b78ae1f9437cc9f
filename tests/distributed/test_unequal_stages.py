"""Pipeline stages, and ranks, that differ in their parameter groups, against one rank.

DeepSpeed all-reduces a gradient norm for each parameter group of a rank. Where stages have other numbers of groups, its
first step never ends: the timeouts here are short.
"""

from __future__ import annotations

import pytest

from tests.distributed.spawn import run_ranks
from tests.distributed.training_runs import tiny_plan, train_curves

STEPS = 3
# With a small eps Adam would take steps of full length along gradients that are rounding only.
ADAM = {"optimizer": {"type": "Adam", "params": {"lr": 0.005, "eps": 1e-5}}}
ONE_STAGE = {"parameter_groups": [{"match": "2.mlp.*", "lr_factor": 0.5}]}
OFFLOAD = {"stage": 1, "offload_optimizer": {"device": "cpu"}}
EXPERTS = {"num_layers": 2, "moe_num_experts": 4, "moe_top_k": 1, "moe_first_k_dense": 1}


def assert_equal_to_one_rank(world, layouts, *, rounding=1e-5, **keys):
    """Curves of layouts of the same training, against that of one rank."""
    keys = {**ADAM, **keys}
    expected = run_ranks(1, train_curves, [tiny_plan(1, **keys)], STEPS, timeout=60)[0][0]
    plans = [tiny_plan(world, **{**keys, **layout}) for layout in layouts]
    for layout, curve in zip(layouts, run_ranks(world, train_curves, plans, STEPS, timeout=60)[0], strict=True):
        for (loss, norm), (loss_1, norm_1) in zip(curve, expected, strict=True):
            assert loss == pytest.approx(loss_1, rel=rounding), layout
            assert norm == pytest.approx(norm_1, rel=10 * rounding), layout


def test_a_group_of_one_stage():
    zero_1 = {"pp": 2, "zero": 1}
    offload = {"pp": 2, "zero_optimization": OFFLOAD}
    assert_equal_to_one_rank(2, [zero_1, offload], **ONE_STAGE)


def test_a_group_of_one_stage_in_16_bits():
    keys = {"num_layers": 2, **ONE_STAGE}
    scaled = {"pp": 2, "zero": 1, "fp16": {"enabled": True, "initial_scale_power": 8}}
    offload = {"pp": 2, "zero_optimization": OFFLOAD, "precision": "bf16"}
    assert_equal_to_one_rank(2, [scaled, offload], rounding=5e-3, **keys)


@pytest.mark.slow
def test_a_group_that_one_stage_lost_by_freezing():
    """The second stage trains matrices only, the first one's embedding of positions decays as a vector does."""
    groups = [{"match": f"{layer}.*{name}", "frozen": True} for layer in (4, 5) for name in ("bias", "norm*")]
    groups.append({"match": "norm.*", "frozen": True})
    assert_equal_to_one_rank(2, [{"pp": 2, "zero": 1}], no_weight_tying=True, parameter_groups=groups)


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys", [{"optimizer": {"type": "Muon", "params": {"lr": 0.003}}}, {"use_mup": True, "mup_base_hidden_size": 16}]
)
def test_the_groups_of_three_stages(keys):
    """The stage in the middle has no embedding: with Muon and muP that is a group of its own."""
    size = {"num_layers": 3, "train_batch_size": 3}
    rounding = 1e-4 if "optimizer" in keys else 1e-5  # Muon multiplies in bf16
    assert_equal_to_one_rank(3, [{"pp": 3, "zero": 1}], rounding=rounding, **size, **keys)


@pytest.mark.slow
def test_a_stage_with_the_embedding_alone():
    layout = {"pp": 4, "zero": 1, "pipe_partition_method": "parameters"}
    assert_equal_to_one_rank(4, [layout], padded_vocab_size=1024)


@pytest.mark.slow
def test_divided_experts_on_one_stage():
    divided = {"pp": 2, "zero": 1, "expert_model_parallel_size": 2}
    half = {**divided, "precision": "bf16", "zero_optimization": OFFLOAD}
    assert_equal_to_one_rank(4, [divided], **EXPERTS)
    assert_equal_to_one_rank(4, [half], rounding=1e-2, **EXPERTS)
