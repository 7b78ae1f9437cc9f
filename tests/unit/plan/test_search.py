"""Search for the fastest layouts: against trying everything, and the keys that choose a layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from neox.config import NeoXConfig
from neox.errors import ConfigError
from neox.plan import RunPlan, gpu_device, resolve
from neox.plan.fit import memory_of_settings
from neox.plan.search import _layouts, suggest_layouts
from neox.plan.time import GPUS, estimate_step
from neox.plan.time.of_plan import likely_gpu, network_shape, step_setting
from tests.plans import SIZES, plan_of

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
    for setting in _layouts(plan):
        if memory(setting).needed(on_cpu=False) <= device.usable:
            times.append(estimate_step(shape, step_setting(setting, plan.config), GPUS[gpu]))
    assert found.best[0].time.seconds <= 1.02 * min(time.seconds for time in times)
    seconds = [layout.time.seconds for layout in found.best]
    assert seconds == sorted(seconds)


def test_schedules_are_searched_that_have_enough_layers_and_micro_batches() -> None:
    tried = {(layout.pp_size, layout.pipeline_schedule, layout.virtual_stages) for layout in _layouts(make_plan(8))}
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
        same = {"no_recompute_blocks": (), "communicated_bytes": 0, "reduce_buffers": 0, "gathered": 0, "sub_group": 0}
        assert replace(again.memory_setting, **same) == replace(layout.setting, **same)


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


def test_experts_stay_divided_as_the_configuration_says():
    keys = {"moe_num_experts": 4, "moe_top_k": 2, "moe_router_type": "topk", "expert_model_parallel_size": 4}
    plan = plan_of(8, **{**SIZES, **keys, "zero_optimization": {"stage": 2}, "precision": "bf16"})
    found = suggest_layouts(plan, gpu_device(plan), GPUS["h100"])
    assert found.best
    for suggestion in found.best:
        layout = suggestion.setting
        assert layout.dp_size % 4 == 0
        assert (layout.pp_size, layout.ep_size) == (1, 4)
        assert layout.zero_stage in (0, 2)
