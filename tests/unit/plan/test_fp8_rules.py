"""`fp8`: what it needs of precision, shapes and hosts, and what it leaves as it is."""

from __future__ import annotations

from typing import Any

import pytest

from neox.config import NeoXConfig, load_config
from neox.config.neox_config import for_inference
from neox.errors import ConfigError
from neox.plan import Capabilities, resolve
from neox.plan.report.text import format_plan
from tests.plans import SMALL, problem_keys, problems_of, small_plan

FP8 = {"precision": "bf16", "fp8": "tensorwise"}


@pytest.mark.parametrize("keys", [{}, {"precision": "fp32"}, {"precision": "fp16"}, {"fp16": {"enabled": True}}])
def test_other_precisions_are_refused(keys: dict[str, Any]):
    (found,) = problem_keys(**SMALL, fp8="tensorwise", **keys)
    assert found == ("fp8", "precision", "fp16", "bf16")


@pytest.mark.parametrize(("bf16", "works"), [(True, True), (False, False)])
def test_an_automatic_precision_is_settled_first(bf16: bool, works: bool):
    config = NeoXConfig.from_flat({**SMALL, "precision": "auto", "fp8": "rowwise"})
    if works:
        assert resolve(config, 1, 100, Capabilities(bf16=bf16)).precision == "bf16"
    else:
        with pytest.raises(ConfigError) as caught:
            resolve(config, 1, 100, Capabilities(bf16=bf16))
        assert caught.value.problems[0].keys[0] == "fp8"


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"mlp_width": 40}, ["dense_h_to_4h.weight is 40 x 32", "dense_4h_to_h.weight is 32 x 40"]),
        ({"model_parallel_size": 4}, ["query_key_value.weight is 24 x 32", "attention.dense.weight is 32 x 8"]),
    ],
)
def test_uneven_matrices_are_named(keys: dict[str, Any], named: list[str]):
    (problem,) = problems_of(keys.get("model_parallel_size", 1), **SMALL, **FP8, **keys)
    assert problem.keys[0] == "fp8"
    assert all(name in problem.message for name in named)
    small_plan(keys.get("model_parallel_size", 1), precision="bf16", **keys)


def test_old_gpus_are_refused_and_hosts_that_nobody_asked_are_not():
    config = NeoXConfig.from_flat({**SMALL, **FP8})
    for fp8 in (True, None):
        resolve(config, 1, 100, Capabilities(fp8=fp8))
    answers = [{"devices": "GPUs", "bf16": True, "fp16": True, "fp8": found} for found in (True, False)]
    with pytest.raises(ConfigError) as caught:
        resolve(config, 2, 100, Capabilities.of_hosts(answers))
    assert caught.value.problems[0].keys == ("fp8",)


def test_only_training_has_it_and_the_plan_shows_it():
    plan = small_plan(**FP8)
    assert "fp8, tensorwise" in format_plan(plan)
    assert for_inference(plan.config).training.fp8 is None
    without = small_plan(precision="bf16")
    assert (plan.layers, plan.memory, plan.deepspeed) == (without.layers, without.memory, without.deepspeed)


@pytest.mark.parametrize("key", ["fp8_format", "use_fp8"])
def test_other_systems_keys_are_answered(key: str, tmp_path):
    (tmp_path / "a.yml").write_text(f"{key}: true\n")
    assert "fp8: tensorwise" in load_config([tmp_path / "a.yml"]).problems[0].message
