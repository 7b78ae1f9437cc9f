"""Rules of preferences and their reference model: each violation is one problem with its keys."""

from __future__ import annotations

from typing import Any

import pytest

from tests.plans import SIZES, problem_keys, small_plan

PAIRS = {"train_impl": "dpo", "pos_train_data_paths": ["a"], "neg_train_data_paths": ["b"]}
COPIED = {**PAIRS, "reference_model": "copy"}
MAMBA = {"attention_config": [[["mamba", "global"], 2]], "precision": "bf16", "norm": "rmsnorm"}
CPU = {"device": "cpu"}
VIOLATIONS: list[tuple[str, tuple[str, ...], dict[str, Any]]] = [
    ("reference_model", ("lora",), {**PAIRS, "reference_model": "without_adapters"}),
    ("train_impl", ("char_level_ppl",), {**PAIRS, "char_level_ppl": True}),
    ("train_impl", ("eod_mask_loss",), {**PAIRS, "train_impl": "orpo", "eod_mask_loss": True}),
    ("reference_model", ("lora",), {**COPIED, "lora": {"r": 4, "alpha": 8, "target": ["dense"]}}),
    ("reference_model", ("precompute_model_name",), {**COPIED, "precompute_model_name": "base"}),
    ("reference_model", ("mamba_selective_fp32_params", "attention_config"), {**COPIED, **MAMBA}),
    (
        "reference_model",
        ("zero_optimization.offload_param.device",),
        {**COPIED, "zero_optimization": {"stage": 3, "offload_param": CPU, "offload_optimizer": CPU}},
    ),
    (
        "reference_model",
        ("zero_optimization.zero_hpz_partition_size",),
        {**COPIED, "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}},
    ),
]


@pytest.mark.parametrize(("key", "others", "change"), VIOLATIONS, ids=lambda value: str(value)[:50])
def test_violation(key: str, others: tuple[str, ...], change: dict[str, Any]) -> None:
    (keys,) = problem_keys(8, **{**SIZES, **change})
    assert {key, *others} <= set(keys)


@pytest.mark.parametrize("change", [{"precision": "fp32"}, {"mamba_selective_fp32_params": False}])
def test_a_copy_of_recurrent_blocks_is_exact_if_nothing_stays_fp32(change: dict[str, Any]) -> None:
    assert problem_keys(8, **{**SIZES, **COPIED, **MAMBA, **change}) == []


@pytest.mark.parametrize("stage", [1, 3])
def test_a_copy_takes_the_memory_of_the_weights(stage: int) -> None:
    zero = {"zero_optimization": {"stage": stage}}
    stored, copied = (small_plan(2, **{**PAIRS, **zero, "reference_model": kind}).memory for kind in ("start", "copy"))
    assert copied.weights == 2 * stored.weights
    assert copied.total - stored.total == stored.weights
