"""Keys of pipeline schedules: Megatron's are converted, and what a schedule cannot do is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from neox.config import NeoXConfig
from neox.errors import ConfigError
from neox.plan import resolve
from neox.plan.report.run_totals import run_totals
from tests.plans import SIZES, plan_of

STAGES = {"pipe_parallel_size": 2, "num_layers": 8, "gradient_accumulation_steps": 4}


@pytest.mark.parametrize(
    "keys",
    [
        {"pipeline_schedule": "interleaved", "virtual_stages": 4},
        {"num_virtual_stages_per_pipeline_rank": 4},
        {"num-layers-per-virtual-pipeline-stage": 1},
        {"num_layers_per_virtual_pipeline_stage": 1, "pipeline_schedule": "interleaved", "virtual_stages": 4},
    ],
)
def test_megatrons_keys_are_converted(keys: dict[str, Any]) -> None:
    plan = plan_of(2, **{**SIZES, **STAGES, **keys})
    assert plan.config.parallelism.pipeline_schedule == "interleaved"
    assert [len(stage.ranges) for stage in plan.stages] == [4, 4]
    again = resolve(NeoXConfig.from_flat(plan.config.to_flat()), 2, plan.vocab_size)
    assert again.stages == plan.stages


def test_one_virtual_stage_is_1f1b() -> None:
    plan = plan_of(2, **{**SIZES, **STAGES, "num_virtual_stages_per_pipeline_rank": 1})
    assert plan.config.parallelism.pipeline_schedule == "1f1b"


INTERLEAVED = {"pipeline_schedule": "interleaved"}
DUAL = {"pipeline_schedule": "dualpipev"}


@pytest.mark.parametrize(
    ("key", "others", "keys"),
    [
        ("num_layers_per_virtual_pipeline_stage", (), {"num_layers_per_virtual_pipeline_stage": 3}),
        (
            "num_virtual_stages_per_pipeline_rank",
            ("virtual_stages",),
            {"num_virtual_stages_per_pipeline_rank": 4, "virtual_stages": 2},
        ),
        ("virtual_stages", (), {**INTERLEAVED, "virtual_stages": 1}),
        ("pipeline_schedule", ("num_layers",), {**INTERLEAVED, "virtual_stages": 5}),
        ("pipeline_schedule", ("num_layers",), {**DUAL, "num_layers": 3}),
        ("pipeline_schedule", ("gradient_accumulation_steps",), {**DUAL, "gradient_accumulation_steps": 3}),
        (
            "pipeline_schedule",
            ("rampup_batch_size",),
            {
                **DUAL,
                "rampup_batch_size": [2, 2, 64],
                "train_batch_size": 8,
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": 8,
            },
        ),
        ("pipe_partition_method", (), {**INTERLEAVED, "pipe_partition_method": "uniform", "lora": {"r": 2}}),
    ],
)
def test_what_does_not_work_is_refused_by_name(key: str, others: tuple[str, ...], keys: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as refusal:
        plan_of(2, **{**SIZES, **STAGES, **keys})
    (problem,) = refusal.value.problems
    assert problem.keys[0] == key
    assert set(others) <= set(problem.keys)


def test_virtual_stages_do_nothing_with_another_schedule() -> None:
    plan = plan_of(2, **{**SIZES, **STAGES, "virtual_stages": 2})
    assert any("virtual_stages" in note for note in plan.notes)


def test_less_waiting_costs_activations() -> None:
    plans = [plan_of(2, **{**SIZES, **STAGES, **keys}) for keys in ({}, INTERLEAVED, DUAL)]
    one, interleaved, dual = (run_totals(plan).bubble for plan in plans)
    assert one == pytest.approx(1 / 5)
    assert interleaved == pytest.approx(1 / 9)
    assert dual < one
    memory = [plan.memory.activations for plan in plans]
    assert memory[0] < memory[1]
    assert memory[0] < memory[2]
