"""Memory of experts that data ranks divide."""

from __future__ import annotations

from typing import Any

import pytest

from neox.plan import RunPlan
from neox.plan.memory import stage_memory
from neox.plan.memory.parameters import count_parameters
from neox.plan.memory.zero import Sharding, sharding_of
from tests.plans import SIZES, plan_of

EXPERTS: dict[str, Any] = {
    **SIZES,
    "hidden_size": 512,
    "train_micro_batch_size_per_gpu": 1,
    "moe_num_experts": 8,
    "moe_router_type": "topk",
}
RANKS = 4


def divided_plan(degree: int, stage: int, **keys: Any) -> RunPlan:
    zero = {"stage": stage, **keys.pop("zero", {})}
    return plan_of(RANKS, **EXPERTS, expert_model_parallel_size=degree, zero_optimization=zero, **keys)


def sharding(plan: RunPlan) -> Sharding:
    run = plan.workload
    return sharding_of(run)(run, count_parameters(run, plan.stages[0]))


def numbers(plan: RunPlan) -> tuple[int, int]:
    """Return the elements outside of experts, and those of all experts."""
    experts = sum(spec.numel for layer in plan.layers for spec in layer.parameters if spec.experts)
    return plan.layers.numel - experts, experts


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_ranks_hold_their_experts_and_divide_the_states_of_all(degree: int) -> None:
    plan = divided_plan(degree, 1)
    dense, experts = numbers(plan)
    held = sharding(plan)
    assert held.count.held == held.count.trained == dense + experts // degree
    assert held.count.own_experts == (experts // degree if degree > 1 else 0)
    assert held.shard == (dense + experts) // RANKS


@pytest.mark.parametrize("degree", [2, 4])
def test_experts_are_averaged_without_a_bucket(degree: int) -> None:
    plan = divided_plan(degree, 0)
    dense, _ = numbers(plan)
    assert sharding(plan).reduction_after_passes() == 4 * dense
    whole = divided_plan(1, 0)
    assert sharding(whole).reduction_after_passes() == 4 * sum(numbers(whole))


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_zero_2_divides_gradients_as_states(degree: int) -> None:
    held = sharding(divided_plan(degree, 2, gradient_accumulation_steps=2))
    assert held.gradients() == held.held_during_passes() == 4 * held.shard


@pytest.mark.parametrize("stage", [1, 2])
def test_offloaded_states_are_those_of_all_experts(stage: int) -> None:
    zero = {"offload_optimizer": {"device": "cpu"}}
    hosts = {divided_plan(degree, stage, zero=zero).memory.host for degree in (1, 2, 4)}
    assert len(hosts) == 1


def test_a_new_gradient_of_all_experts_is_held_next_to_their_sum() -> None:
    """ZeRO 2 copies it if it does not fit in a bucket."""
    activations = {}
    largest = 8 * 512 * 4 * 512 // 2
    for bucket in (largest, largest - 1):
        plan = divided_plan(2, 2, zero={"reduce_bucket_size": bucket}, gradient_accumulation_steps=2)
        # so many tokens that passes hold more than the update
        run = plan.workload.with_layout(micro_batch_size=64)
        activations[bucket] = stage_memory(run, plan.stages[0]).activations
    assert activations[largest - 1] - activations[largest] == 4 * largest
