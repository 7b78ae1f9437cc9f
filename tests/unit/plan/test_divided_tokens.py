"""Rules of sequence_parallel, and what the plan says of it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.plans import SMALL, problem_keys, small_plan

ODD_LENGTHS = {
    "enabled": True,
    "min_difficulty": 3,
    "max_difficulty": 16,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 5, "difficulty_step": 3},
}


@pytest.mark.parametrize(
    ("first", "others", "keys"),
    [
        ("seq_length", {"model_parallel_size"}, {"seq_length": 15}),
        ("sequence_parallel", {"soft_prompt_tuning"}, {"soft_prompt_tuning": {"enabled": True, "num_tokens": 2}}),
        (
            "partition_activations",
            {"sequence_parallel"},
            {"checkpoint_activations": True, "partition_activations": True},
        ),
        ("sequence_parallel", {"curriculum_learning"}, {"curriculum_learning": ODD_LENGTHS}),
    ],
)
def test_what_cannot_be_divided_is_refused(first: str, others: set[str], keys: dict[str, Any]):
    divided = {"model_parallel_size": 2, "sequence_parallel": True}
    (found,) = problem_keys(2, **{**SMALL, **divided, **keys})
    assert found[0] == first
    assert others <= set(found)


def test_one_tensor_rank_has_nothing_to_divide():
    plan = small_plan(sequence_parallel=True)
    assert not plan.grid.sequence_parallel
    assert any("sequence_parallel: true" in note and "model_parallel_size: 1" in note for note in plan.notes)
