"""Every key of ZeRO against one rank, with divided experts, pipeline stages and tensor ranks.

None of these keys is about numbers. DeepSpeed has another code path for most of them, and some are wrong for experts or
stages. Losses of later steps show the weights.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest

from neox.errors import ConfigError
from tests.distributed.spawn import run_ranks
from tests.distributed.training_runs import tiny_plan, train_curves

STEPS = 4
# Two micro batches on each of four data ranks. With a small eps Adam would take full steps along rounded gradients.
BASE: dict[str, Any] = {
    "num_layers": 2,
    "train_batch_size": 8,
    "optimizer": {"type": "Adam", "params": {"lr": 0.005, "betas": [0.9, 0.95], "eps": 1e-5}},
}
EXPERTS = {"moe_num_experts": 4, "moe_top_k": 1}
DIVIDED = {"expert_model_parallel_size": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "data ranks": (2, {}, {}),
    "experts": (2, DIVIDED, EXPERTS),
    "experts of two ranks each": (4, DIVIDED, EXPERTS),
    "stages": (4, {"pp": 2}, {}),
    "tensor ranks": (4, {"mp": 2}, {}),
    "stages with experts": (4, {"pp": 2, **DIVIDED}, EXPERTS),
    "tensor ranks with experts": (4, {"mp": 2, **DIVIDED}, EXPERTS),
}
"""Layout -> number of ranks, its keys, and keys of the network."""

OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
KEYS: tuple[dict[str, Any], ...] = (
    {"contiguous_gradients": False},
    {"reduce_scatter": False},
    {"reduce_bucket_size": 500},  # smaller than some parameters
    {"reduce_bucket_size": 2000},
    {"allgather_partitions": False, "allgather_bucket_size": 200},
    {"overlap_comm": True},
    {"overlap_comm": False},
    {"round_robin_gradients": True},
    {"ignore_unused_parameters": False},
    OFFLOAD,
    {"contiguous_gradients": False, "reduce_bucket_size": 500},
    {"contiguous_gradients": False, "overlap_comm": True},
    {"contiguous_gradients": False, "round_robin_gradients": True},
    {"contiguous_gradients": False, "reduce_scatter": False},
    {"contiguous_gradients": False, **OFFLOAD},
    {"reduce_scatter": False, "reduce_bucket_size": 500},
    {"reduce_scatter": False, "overlap_comm": True},
    {"reduce_scatter": False, "round_robin_gradients": True},
    {"reduce_scatter": False, **OFFLOAD},
    {"overlap_comm": True, "reduce_bucket_size": 500},
    {"overlap_comm": True, "round_robin_gradients": True},
    {"overlap_comm": True, **OFFLOAD},
    {"round_robin_gradients": True, "reduce_bucket_size": 500},
    {"round_robin_gradients": True, **OFFLOAD},
    {"reduce_bucket_size": 500, **OFFLOAD},
)
KEYS_OF_ZERO_3: tuple[dict[str, Any], ...] = (
    {},
    {"contiguous_gradients": False},
    {"reduce_scatter": False},
    {"reduce_scatter": False, "contiguous_gradients": False},
    {"reduce_scatter": False, "reduce_bucket_size": 500},
    {"reduce_bucket_size": 500},
    {"overlap_comm": True, "reduce_bucket_size": 500},
    {"overlap_comm": False},
    {"round_robin_gradients": True},
    {"sub_group_size": 500},
    {"stage3_param_persistence_threshold": 0},
    {"stage3_param_persistence_threshold": 10**6},
    {"stage3_prefetch_bucket_size": 0, "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0},
    OFFLOAD,
    {**OFFLOAD, "reduce_scatter": False, "sub_group_size": 500},
    {**OFFLOAD, "offload_param": {"device": "cpu"}},
)
OUTSIDE: tuple[dict[str, Any], ...] = (
    {"prescale_gradients": True},
    {"gradient_predivide_factor": 2.0},
    {"communication_data_type": "fp32"},
    {"fp32_allreduce": True},
    {"data_types": {"grad_accum_dtype": "fp32"}},
)
"""Keys outside of the block, which ZeRO's reduction reads."""


def variants(stages: tuple[int, ...]) -> list[dict[str, Any]]:
    """Keys of all trainings of a layout."""
    found = []
    for stage in stages:
        inside = KEYS_OF_ZERO_3 if stage == 3 else KEYS
        found += [{"zero_optimization": {"stage": stage, **keys}} for keys in inside]
        found += [{"zero": stage, **keys} for keys in OUTSIDE]
        found += [{"zero_optimization": {"stage": stage, "reduce_scatter": False}, **keys} for keys in OUTSIDE[:2]]
    return found


def assert_as_on_one_rank(name: str, stages: tuple[int, ...], tolerance: float, **precision: Any) -> None:
    world, layout, network = LAYOUTS[name]
    expected = run_ranks(1, train_curves, [tiny_plan(1, **BASE, **network)], STEPS)[0][0]
    chosen = []
    for keys in variants(stages):
        with suppress(ConfigError):  # refused by name: `tests/unit/plan/`
            chosen.append((keys, tiny_plan(world, **{**BASE, **network, **layout, **precision, **keys})))
    assert len(chosen) > 10
    curves = run_ranks(world, train_curves, [plan for _, plan in chosen], STEPS, timeout=600)[0]
    for (keys, _), curve in zip(chosen, curves, strict=True):
        for (loss, norm), (loss_1, norm_1) in zip(curve, expected, strict=True):
            assert loss == pytest.approx(loss_1, rel=tolerance), keys
            assert norm == pytest.approx(norm_1, rel=10 * tolerance), keys


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_keys_of_zero_change_no_number(name):
    assert_as_on_one_rank(name, (1, 2), 2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, (_, layout, _) in LAYOUTS.items() if "pp" not in layout])
def test_keys_of_zero_3_change_no_number(name):
    assert_as_on_one_rank(name, (3,), 2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["data ranks", "experts", "stages"])
@pytest.mark.parametrize("precision", [{"precision": "bf16"}, {"fp16": {"enabled": True, "initial_scale_power": 8}}])
def test_keys_of_zero_change_no_number_in_16_bits(name, precision):
    assert_as_on_one_rank(name, (1, 2), 3e-3, **precision)
