"""Search for the fastest layouts: against trying everything, and the keys that choose a layout."""

from __future__ import annotations

from dataclasses import fields
from itertools import islice
from operator import itemgetter
from typing import Any

import pytest

from neox.config import NeoXConfig
from neox.config.neox_config import known_keys
from neox.devices import GPUS
from neox.errors import ConfigError
from neox.plan import RunPlan, gpu_device, resolve
from neox.plan.devices.device import likely_gpu
from neox.plan.layout import KEYS_OF_LAYOUT, Layout
from neox.plan.memory import fullest_stage
from neox.plan.search.candidates import layouts
from neox.plan.search.fastest import Suggestions, suggest_layouts
from neox.plan.search.fit import LayoutMemory, nested_keys
from neox.plan.time import estimate_step

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
    memory = LayoutMemory(plan, device)
    times = []
    for layout in layouts(plan):
        run = memory.workload(layout)
        if run.sums_in_bf16 == plan.workload.sums_in_bf16 and memory.fits(layout):
            times.append(estimate_step(run, GPUS[gpu]))
    assert found.best[0].time.seconds <= 1.02 * min(time.seconds for time in times)
    seconds = [layout.time.seconds for layout in found.best]
    assert seconds == sorted(seconds)


def test_schedules_are_searched_that_have_enough_layers_and_micro_batches() -> None:
    plan = make_plan(8)
    tried = set()
    for layout in layouts(plan):
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
        assert again.layout == layout.run.layout


def test_each_field_of_a_layout_has_its_key() -> None:
    names = [field.name for field in fields(Layout) if field.name != "dp_size"]  # it follows from the ranks
    assert list(KEYS_OF_LAYOUT) == names
    flat = {key.partition(".")[0] for key, _ in KEYS_OF_LAYOUT.values()}
    assert flat <= set(known_keys())


def test_memory_of_a_layout_is_that_of_the_plan_with_its_keys() -> None:
    """A key that no layout changes counts as given: chunks of four recomputed blocks are not one block each."""
    plan = make_plan(8, num_layers=4, checkpoint_activations=True, checkpoint_num_layers=4)
    memory = LayoutMemory(plan, gpu_device(plan))
    compared = 0
    for layout in islice(layouts(plan), 0, None, 25):
        try:
            of_keys = again(plan, layout.keys_changed_from(plan.layout))
        except ConfigError:
            continue
        assert of_keys.layout == layout
        assert of_keys.memory == memory.of(layout)
        compared += layout.recomputes
    assert compared > 5


@pytest.mark.parametrize("zero", [{"stage": 1}, {"stage": 1, "overlap_comm": False}, {"stage": 0}])
@pytest.mark.parametrize("types", [{}, {"data_types": {"grad_accum_dtype": "bf16"}}])
def test_stages_that_are_proposed_are_those_of_the_plan_with_them(zero: dict[str, Any], types: dict[str, Any]) -> None:
    """A ZeRO stage changes the defaults of its buffers and of the precision of sums; keys that are given stay."""
    if zero["stage"] == 0:
        types = {}
    plan = make_plan(8, zero_optimization=zero, **types)
    for stage in (1, 2, 3):
        keys = nested_keys(plan.config, [("zero_optimization.stage", str(stage))])
        again = resolve(plan.config.updated(keys), 8, plan.vocab_size)
        proposed = plan.workload.with_layout(zero_stage=stage)
        assert proposed.layout == again.layout
        assert proposed.fp32_gradients == again.workload.fp32_gradients
        assert proposed.overlaps_reduction == again.workload.overlaps_reduction
        assert fullest_stage(proposed, plan.stages) == again.memory


@pytest.mark.parametrize("stage", [0, 1])
def test_layouts_that_add_gradients_in_another_precision_are_apart(stage: int) -> None:
    """ZeRO 0 in bf16 adds micro batches in bf16, the others in fp32: that trains something else, faster or not."""
    plan = make_plan(8, zero_optimization={"stage": stage}, train_micro_batch_size_per_gpu=1)
    found = suggest_layouts(plan, gpu_device(plan, 79.1 * GIB), GPUS["h100"])
    assert plan.workload.sums_in_bf16 == (stage == 0)
    assert {layout.run.sums_in_bf16 for layout in found.best} == {stage == 0}
    assert {layout.run.sums_in_bf16 for layout in found.other_numerics} == {stage != 0}


def test_networks_without_an_estimate_are_refused() -> None:
    plan = make_plan(1, attention_config=[[["gmlp"], "all"]], num_layers=2)
    with pytest.raises(ConfigError):
        suggest_layouts(plan, gpu_device(plan), GPUS["h100"])


@pytest.mark.parametrize(("memory", "expected"), [(40, "a100-40"), (80, "h100"), (32, "v100")])
def test_gpus_by_memory(memory: float, expected: str) -> None:
    peak = {} if expected != "v100" else {"peak_theoretical_tflops": 125.0}
    assert likely_gpu(make_plan(1, gpu_memory_gib=memory, **peak).config) == expected


def test_the_gpu_that_the_configuration_names() -> None:
    assert likely_gpu(make_plan(1, gpu_type="a100-40", gpu_memory_gib=80).config) == "a100-40"


def again(plan: RunPlan, changes: tuple[tuple[str, str], ...]) -> RunPlan:
    """Return the plan of a configuration with changed keys."""
    return resolve(plan.config.updated(nested_keys(plan.config, changes)), plan.grid.world_size, plan.vocab_size)


def assert_best_of_all(plan: RunPlan, gpu: str, memory_gib: float) -> Suggestions:
    """Compare the search with the estimates of all layouts that fit and that the rules accept; return its result."""
    device = gpu_device(plan, memory_gib * GIB)
    found = suggest_layouts(plan, device, GPUS[gpu])
    memory = LayoutMemory(plan, device)
    times = []
    for layout in layouts(plan):
        run = memory.workload(layout)
        if run.sums_in_bf16 == plan.workload.sums_in_bf16 and memory.fits(layout):
            times.append((estimate_step(run, GPUS[gpu]).seconds, layout))
    for best, layout in sorted(times, key=itemgetter(0)):
        try:
            again(plan, layout.keys_changed_from(plan.layout))
        except ConfigError:
            continue
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
    assert {layout.ep_size for layout in layouts(plan)} == {1, 2, 4}
    for suggestion in found.best:
        assert again(plan, suggestion.changes).grid.ep_size == suggestion.run.layout.ep_size


@pytest.mark.parametrize("kind", ["all_gather", "ulysses"])
def test_context_degrees_are_searched(kind: str) -> None:
    plan = make_plan(8, **LONG, context_parallel_kind=kind)
    found = assert_best_of_all(plan, "a100-40", 39.4)
    assert any(layout.run.layout.cp_size > 1 for layout in found.best), "two samples for eight ranks"
    for suggestion in found.best:
        grid = again(plan, suggestion.changes).grid
        assert (grid.cp_size, grid.dp_size) == (suggestion.run.layout.cp_size, suggestion.run.layout.dp_size)


def test_offload_is_suggested_if_nothing_else_fits() -> None:
    plan = make_plan(2, num_layers=48, hidden_size=4096, num_attention_heads=32, train_batch_size=2)
    found = assert_best_of_all(plan, "a100-40", 39.4)
    assert found.best
    for suggestion in found.best:
        zero = again(plan, suggestion.changes).config.deepspeed.zero_optimization
        assert zero.offloads_optimizer
        assert zero.offloads_weights == suggestion.run.layout.offloads_weights
    fits_without = assert_best_of_all(plan, "h200", 139.8).best[0]
    assert not fits_without.run.layout.offloads_states


def test_one_data_rank_tries_the_stages_with_which_more_leaves_the_device() -> None:
    keys = {"hidden_size": 4096, "num_attention_heads": 32, "train_batch_size": 1}
    plan = make_plan(1, num_layers=40, zero_optimization={"stage": 1}, **keys)
    found = assert_best_of_all(plan, "h100", 79.1)
    assert found.best
    assert {suggestion.run.layout.zero_stage for suggestion in found.best} == {2, 3}  # the gradients leave it too
    small = make_plan(1)
    layouts = [suggestion.run.layout for suggestion in suggest_layouts(small, gpu_device(small), GPUS["h100"]).best]
    without = {layout.zero_stage for layout in layouts if not layout.offloads_states}
    assert without == {small.layout.zero_stage}  # another stage has nothing to shard


def test_offload_that_is_configured_can_be_left_out() -> None:
    zero = {"stage": 1, "offload_optimizer": {"device": "cpu"}}
    plan = make_plan(2, zero_optimization=zero)
    best = suggest_layouts(plan, gpu_device(plan), GPUS["h100"]).best[0]
    assert not best.run.layout.offloads_states
    assert not again(plan, best.changes).config.deepspeed.zero_optimization.offloads_optimizer
