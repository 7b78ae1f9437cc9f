"""Whether layers are compiled has one answer, in the engine, the report, memory and time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from neox.devices import GPUS, DeviceFamily
from neox.engine.build_engine import compile_blocks
from neox.engine.device import other_paths
from neox.model import GPT, Block
from neox.parallel import ParallelGrid
from neox.plan import RunPlan
from neox.plan.devices.fast_paths import path_choices
from neox.plan.time import estimate_step
from tests.plans import SMALL, plan_of

WIDE: dict[str, Any] = {**SMALL, "hidden_size": 64, "num_attention_heads": 4, "precision": "bf16"}
SCALED = {"apply_query_key_layer_scaling": True, "precision": "fp16"}
ATTENTION_AGAIN = {"checkpoint_activations": True, "recompute_granularity": "full_attn"}
CASES: list[tuple[DeviceFamily, dict[str, Any], bool]] = [
    ("cuda", {}, True),
    ("cuda", {"deterministic": True}, False),
    ("cuda", {"mlp_tile_size": 2}, False),
    ("cuda", SCALED, False),
    ("cuda", ATTENTION_AGAIN, False),
    ("cuda", {"zero_optimization": {"stage": 3}}, False),
    ("cuda", {"compile_layers": False}, False),
    ("npu", {}, False),
    ("npu", {"compile_layers": True}, True),
    ("cpu", {}, False),
    ("cpu", {"compile_layers": True}, True),
    ("cpu", {"activation_memory_budget": 0.5}, True),
]


def compiled_in_report(plan: RunPlan, family: DeviceFamily) -> bool:
    return any(choice.is_taken for choice in path_choices(plan, family) if choice.name == "compiled_layers")


@pytest.mark.parametrize(("family", "keys", "expected"), CASES)
def test_report_memory_and_time_agree(family: DeviceFamily, keys: dict[str, Any], expected: bool) -> None:
    plan = plan_of(**WIDE | keys)
    workload = plan.workload_on(family)
    assert compiled_in_report(plan, family) is expected
    assert workload.compiles_layers is expected
    switched = plan_of(**WIDE | keys | {"compile_layers": expected, "activation_memory_budget": None})
    if family == "cuda":
        seconds = [estimate_step(run, GPUS["h100"]).elementwise for run in (workload, switched.workload)]
        assert seconds[0] == seconds[1]


@pytest.mark.parametrize(
    "slower",
    [{"deterministic": True}, {"mlp_tile_size": 2}, {"compile_layers": False}],
    ids=lambda keys: next(iter(keys)),
)
def test_layers_that_are_not_compiled_take_longer(slower: dict[str, Any]) -> None:
    compiled, eager = (estimate_step(plan_of(**WIDE | keys).workload, GPUS["h100"]) for keys in ({}, slower))
    assert eager.elementwise > 1.3 * compiled.elementwise


@pytest.mark.parametrize("keys", [{}, {"compile_layers": True}])
def test_a_cpu_rank_compiles_what_its_plan_says(keys: dict[str, Any]) -> None:
    plan = plan_of(**WIDE | keys)
    model = GPT(plan, ParallelGrid.single())
    compile_blocks(model, plan, torch.device("cpu"))
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    assert blocks
    for block in blocks:
        assert (block._compiled_call_impl is not None) is compiled_in_report(plan, "cpu")


def test_a_search_asks_for_the_layout_that_it_tries() -> None:
    run = plan_of(**WIDE | {"zero_optimization": {"stage": 1}}).workload
    assert run.compiles_layers
    assert not run.with_layout(zero_stage=3).compiles_layers
    assert not run.with_layout(tile_tokens=2).compiles_layers
    assert run.with_layout(recomputes=True, recomputed_part="full").compiles_layers
    assert not run.with_layout(recomputes=True, recomputed_part="core_attn").compiles_layers


def test_ranks_of_another_device_than_planned_compile_too_if_that_is_asked_for() -> None:
    plan = replace(plan_of(**WIDE | {"compile_layers": True}), device_family="cuda")
    assert all("compiled_layers" not in line for line in other_paths(plan, torch.device("cpu")))
