"""Search for the fastest layouts: against trying everything, and the keys that choose a layout."""

from __future__ import annotations

from dataclasses import replace
from operator import itemgetter
from typing import Any

import pytest

from neox.config import NeoXConfig
from neox.errors import ConfigError
from neox.plan import RunPlan, gpu_device, resolve
from neox.plan.fit import memory_of_settings, nested_keys, setting_changes
from neox.plan.layouts import layouts
from neox.plan.memory import at_zero_stage
from neox.plan.search import Suggestions, suggest_layouts
from neox.plan.time import GPUS, estimate_step
from neox.plan.time.of_plan import likely_gpu, network_shape, step_setting

GIB = 2**30
MEDIUM: dict[str, Any] = {
    "num_layers": 24,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "seq_length": 2048,
    "max_position_embeddings": 2048,
    "pos_emb": "rotary",
    "no_weight_tying": True,
    "train_batch_size": 64,
    "train_iters": 10,
    "precision": "bf16",
    "attention_config": [[["flash"], "all"]],
    "zero_optimization": {"stage": 1},
}


def make_plan(world: int, **keys: Any) -> RunPlan:
    return resolve(NeoXConfig.from_flat({**MEDIUM, **keys}), world, 50_000)


@pytest.mark.parametrize(("world", "gpu", "keys"), [(8, "a100-40", {}), (16, "v100", {"precision": "fp16"})])
def test_the_best_is_that_of_trying_everything(world: int, gpu: str, keys: dict[str, Any]) -> None:
    plan = make_plan(world, **keys)
    device = gpu_device(plan, GPUS[gpu].memory_gib * GIB)
    found = suggest_layouts(plan, device, GPUS[gpu])
    shape = network_shape(plan.layers)
    assert shape is not None
    memory = memory_of_settings(plan)
    times = []
    for setting in layouts(plan, plan.memory_setting):
        alike = setting.sums_in_bf16 == plan.memory_setting.sums_in_bf16
        if alike and memory(setting).needed(on_cpu=False) <= device.usable:
            times.append(estimate_step(shape, step_setting(setting, plan.config), GPUS[gpu]))
    assert found.best[0].time.seconds <= 1.02 * min(time.seconds for time in times)
    seconds = [layout.time.seconds for layout in found.best]
    assert seconds == sorted(seconds)


def test_schedules_are_searched_that_have_enough_layers_and_micro_batches() -> None:
    plan = make_plan(8)
    tried = set()
    for layout in layouts(plan, plan.memory_setting):
        tried.add((layout.pp_size, layout.pipeline_schedule, layout.virtual_stages))
    assert (2, "interleaved", 4) in tried
    assert (8, "dualpipev", None) in tried
    assert (8, "interleaved", 4) not in tried, "24 blocks are less than 32 ranges"
    assert all(name == "1f1b" for stages, name, _ in tried if stages == 1)


def test_every_layout_fits_and_its_keys_give_it() -> None:
    plan = make_plan(8)
    device = gpu_device(plan, 39.4 * GIB)
    for layout in suggest_layouts(plan, device, GPUS["a100-40"]).best:
        assert layout.memory.needed(on_cpu=False) <= device.usable
        config = NeoXConfig.from_flat(MEDIUM)
        flat = config.to_flat()
        for dotted, text in layout.changes:
            block, _, last = dotted.rpartition(".")
            value = {"true": True, "false": False}.get(text, int(text) if text.isdecimal() else text)
            if block:
                flat[block] = {**flat.get(block, {}), last: value}
            else:
                flat[dotted] = value
        again = resolve(NeoXConfig.from_flat(flat), 8, 50_000)
        assert again.batch.train_batch_size == plan.batch.train_batch_size
        same = {"no_recompute_blocks": ()}
        assert replace(again.memory_setting, **same) == replace(layout.setting, **same)


@pytest.mark.parametrize("zero", [{"stage": 1}, {"stage": 1, "overlap_comm": False}, {"stage": 0}])
@pytest.mark.parametrize("types", [{}, {"data_types": {"grad_accum_dtype": "bf16"}}])
def test_stages_that_are_proposed_are_those_of_the_plan_with_them(zero: dict[str, Any], types: dict[str, Any]) -> None:
    """A ZeRO stage changes the defaults of its buffers and of the precision of sums; keys that are given stay."""
    if zero["stage"] == 0:
        types = {}
    plan = make_plan(8, zero_optimization=zero, **types)
    for stage in (1, 2, 3):
        keys = nested_keys(plan.config, [("zero_optimization.stage", str(stage))])
        again = resolve(plan.config.updated(keys), 8, plan.vocab_size).memory_setting
        assert at_zero_stage(plan.memory_setting, stage, plan.config.deepspeed) == again


@pytest.mark.parametrize("stage", [0, 1])
def test_layouts_that_add_gradients_in_another_precision_are_apart(stage: int) -> None:
    """ZeRO 0 in bf16 adds micro batches in bf16, the others in fp32: that trains something else, faster or not."""
    plan = make_plan(8, zero_optimization={"stage": stage}, train_micro_batch_size_per_gpu=1)
    found = suggest_layouts(plan, gpu_device(plan, 79.1 * GIB), GPUS["h100"])
    assert plan.memory_setting.sums_in_bf16 == (stage == 0)
    assert {layout.setting.sums_in_bf16 for layout in found.best} == {stage == 0}
    assert {layout.setting.sums_in_bf16 for layout in found.other_numerics} == {stage != 0}


def test_networks_without_an_estimate_are_refused() -> None:
    plan = make_plan(1, attention_config=[[["gmlp"], "all"]], num_layers=2)
    with pytest.raises(ConfigError):
        suggest_layouts(plan, gpu_device(plan), GPUS["h100"])


@pytest.mark.parametrize(("memory", "expected"), [(40, "a100-40"), (80, "h100"), (32, "v100")])
def test_gpus_by_memory(memory: float, expected: str) -> None:
    peak = {} if expected != "v100" else {"peak_theoretical_tflops": 125.0}
    assert likely_gpu(make_plan(1, gpu_memory_gib=memory, **peak))[0] == expected


def test_the_gpu_that_the_configuration_names() -> None:
    assert likely_gpu(make_plan(1, gpu_type="a100-40", gpu_memory_gib=80))[0] == "a100-40"


def again(plan: RunPlan, changes: tuple[tuple[str, str], ...]) -> RunPlan:
    """Return the plan of a configuration with changed keys."""
    return resolve(plan.config.updated(nested_keys(plan.config, changes)), plan.grid.world_size, plan.vocab_size)


def assert_best_of_all(plan: RunPlan, gpu: str, memory_gib: float) -> Suggestions:
    """Compare the search with the estimates of all layouts that fit and that the rules accept; return its result."""
    device = gpu_device(plan, memory_gib * GIB)
    found = suggest_layouts(plan, device, GPUS[gpu])
    shape = network_shape(plan.layers)
    assert shape is not None
    memory = memory_of_settings(plan)
    start = plan.memory_setting
    times = []
    for setting in layouts(plan, start):
        alike = setting.sums_in_bf16 == start.sums_in_bf16
        if alike and memory(setting).needed(on_cpu=False) <= device.usable:
            times.append((estimate_step(shape, step_setting(setting, plan.config), GPUS[gpu]).seconds, setting))
    for _, setting in sorted(times, key=itemgetter(0)):
        try:
            again(plan, setting_changes(start, setting))
        except ConfigError:
            continue
        best = estimate_step(shape, step_setting(setting, plan.config), GPUS[gpu]).seconds
        assert found.best[0].time.seconds <= 1.02 * best
        return found
    raise AssertionError("no layout fits")


MIXTURE = {"moe_num_experts": 4, "moe_top_k": 2, "moe_router_type": "topk", "expert_model_parallel_size": 4}
LONG = {
    "num_layers": 4,
    "seq_length": 16384,
    "max_position_embeddings": 16384,
    "train_batch_size": 2,
    "context_parallel_size": 4,
}


def test_expert_degrees_are_searched() -> None:
    plan = make_plan(8, **MIXTURE, num_layers=4, zero_optimization={"stage": 2})
    found = assert_best_of_all(plan, "h100", 79.1)
    assert {layout.ep_size for layout in layouts(plan, plan.memory_setting)} == {1, 2, 4}
    for suggestion in found.best:
        assert again(plan, suggestion.changes).grid.ep_size == suggestion.setting.ep_size


@pytest.mark.parametrize("kind", ["all_gather", "ulysses"])
def test_context_degrees_are_searched(kind: str) -> None:
    plan = make_plan(8, **LONG, context_parallel_kind=kind)
    found = assert_best_of_all(plan, "a100-40", 39.4)
    assert any(layout.setting.cp_size > 1 for layout in found.best), "two samples for eight ranks"
    for suggestion in found.best:
        grid = again(plan, suggestion.changes).grid
        assert (grid.cp_size, grid.dp_size) == (suggestion.setting.cp_size, suggestion.setting.dp_size)


def test_offload_is_suggested_if_nothing_else_fits() -> None:
    plan = make_plan(2, num_layers=48, hidden_size=4096, num_attention_heads=32, train_batch_size=2)
    found = assert_best_of_all(plan, "a100-40", 39.4)
    assert found.best
    for suggestion in found.best:
        zero = again(plan, suggestion.changes).config.deepspeed.zero_optimization
        assert zero.offloads_optimizer
        assert zero.offloads_weights == suggestion.setting.offloads_weights
    fits_without = assert_best_of_all(plan, "h200", 139.8).best[0]
    assert not fits_without.setting.offloads_states


def test_offload_that_is_configured_can_be_left_out() -> None:
    zero = {"stage": 1, "offload_optimizer": {"device": "cpu"}}
    plan = make_plan(2, zero_optimization=zero)
    best = suggest_layouts(plan, gpu_device(plan), GPUS["h100"]).best[0]
    assert not best.setting.offloads_states
    assert not again(plan, best.changes).config.deepspeed.zero_optimization.offloads_optimizer
