"""The longest samples that a dry run names fit, a few more tokens do not, and its changes let twice as many fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from neox.config import NeoXConfig
from neox.plan import gpu_device, resolve
from neox.plan.devices.device import memory_on
from neox.plan.report.as_json import plan_as_dict
from neox.plan.report.text import format_plan
from neox.plan.search.longest_sequence import longest_sample

BASE: dict[str, Any] = {
    "num_layers": 16,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "seq_length": 2048,
    "pos_emb": "rotary",
    "attention_config": [[["flash"], "all"]],
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "precision": "bf16",
    "train_micro_batch_size_per_gpu": 1,
    "gpu_memory_gib": 40,
    "compile_layers": False,
}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "recomputed": (8, {"checkpoint_activations": True, "zero_optimization": {"stage": 1}}),
    "tensor ranks": (4, {"model_parallel_size": 4, "sequence_parallel": True, "checkpoint_activations": True}),
    "stages": (4, {"pipe_parallel_size": 4, "gradient_accumulation_steps": 8}),
    "context ranks": (4, {"context_parallel_size": 4, "zero_optimization": {"stage": 3}}),
}


def plan_of(world: int, **keys: Any) -> Any:
    return resolve(NeoXConfig.from_flat({**BASE, **keys}), world, 50_000)


def needed(world: int, **keys: Any) -> int:
    return memory_on(plan_of(world, **keys), gpu_device(plan_of(world, **keys))).total


@pytest.mark.parametrize("name", CASES)
def test_the_longest_samples_fit_and_longer_ones_do_not(name: str) -> None:
    world, keys = CASES[name]
    plan = plan_of(world, **keys)
    device = gpu_device(plan)
    found = longest_sample(plan, device)
    assert found is not None
    assert found.tokens > 2048
    assert needed(world, **{**keys, "seq_length": found.tokens}) <= device.usable
    assert needed(world, **{**keys, "seq_length": found.tokens + 256}) > device.usable
    changed = {**keys, **typed(found.changes), "seq_length": 2 * found.tokens}
    assert found.world >= world
    assert needed(found.world, **changed) <= device.usable
    assert f"{found.tokens:,}" in format_plan(plan, device)
    memory = plan_as_dict(plan, device)["memory"]
    assert memory["longest_seq_length"] == found.tokens
    assert memory["twice_as_long_with"] == dict(found.changes)


def typed(changes: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    """Return changed keys with their values, as `--set` reads them."""
    import yaml

    flat: dict[str, Any] = {}
    for key, text in changes:
        section, _, name = key.partition(".")
        value = yaml.safe_load(text)
        if name:
            flat.setdefault(section, {})[name] = value
        else:
            flat[section] = value
    return flat


def test_too_little_memory_and_lengths_that_parameters_depend_on() -> None:
    plan = plan_of(1)
    device = replace(gpu_device(plan), usable=2**30)
    found = longest_sample(plan, device)
    assert found is not None
    assert found.tokens == 0
    assert longest_sample(plan_of(1, pos_emb="learned"), gpu_device(plan)) is None
